"""Where numbers become half precision; what is counted is compared with NumPy."""

from __future__ import annotations

import copy
import io
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from ampscope.observations import HalfSite
from ampscope.records import Cadence
from ampscope.runner.controls import applied
from ampscope.runner.script_recorder import ScriptRecorder


class Listening:
    """The sites of what runs inside, by the text of their line."""

    def __init__(self) -> None:
        self.recorder = ScriptRecorder(
            str(Path(__file__).parent), Cadence(0, 0, 0), lambda count: None
        )

    def sites(self) -> list[HalfSite]:
        assert not self.recorder.sites.failures.note
        return self.recorder.sites.records()

    def at(self, line: int) -> list[HalfSite]:
        return [site for site in self.sites() if site.line.endswith(f"test_half_sites.py:{line}")]


@pytest.fixture
def listening() -> Iterator[Listening]:
    found = Listening()
    with found.recorder.watching():
        yield found


def here() -> int:
    """The line that calls."""
    return sys._getframe(1).f_lineno


def test_counts_of_a_cast_are_those_of_numpy(listening: Listening) -> None:
    generator = np.random.default_rng(0)
    numbers = np.concatenate(
        [generator.normal(0, 1, 300), generator.normal(0, 1e-8, 100), [7e4, -9e4, 0.0]]
    ).astype(np.float32)
    tensor = torch.from_numpy(numbers)
    line = here() + 1
    tensor.half()
    (site,) = listening.at(line)
    with np.errstate(over="ignore"):
        half = numbers.astype(np.float16)
    wide = half.astype(np.float64)
    finite = np.isfinite(wide)
    assert (site.kind, site.op, site.dtype, site.calls) == ("cast", "Tensor.half", "fp16", 1)
    assert site.prepares
    assert site.step == 0
    assert site.elements == len(numbers)
    assert site.changed == int((wide != numbers).sum())
    assert site.zeroed == int(((half == 0) & (numbers != 0)).sum())
    assert site.infinite == 2
    assert site.distinct == len(np.unique(numbers))
    assert site.merged == len(np.unique(numbers)) - len(np.unique(half))
    assert not site.whole
    assert site.largest == 9e4
    off = np.linalg.norm((wide - numbers)[finite]) / np.linalg.norm(numbers[finite].astype(float))
    assert site.error == pytest.approx(off)


def test_whole_numbers_that_fall_onto_one_another(listening: Listening) -> None:
    ids = torch.arange(3000)
    line = here() + 1
    ids.to(torch.float16)
    (site,) = listening.at(line)
    kept = len(np.unique(np.arange(3000).astype(np.float16)))
    assert (site.role, site.whole, site.distinct, site.merged) == (
        "whole numbers", True, 3000, 3000 - kept
    )  # fmt: skip


def test_every_way_to_cast(listening: Listening) -> None:
    x = torch.linspace(0, 1, 7)
    half = torch.zeros(7, dtype=torch.float16)
    first = here() + 1
    x.half()
    x.bfloat16()
    x.to(torch.bfloat16)
    x.to(dtype=torch.float16)
    x.to(half)
    x.type(torch.float16)
    x.type("torch.HalfTensor")
    x.type_as(half)
    half.copy_(x)
    torch.as_tensor(x, dtype=torch.float16)
    last = here()
    for line in range(first, last):
        (site,) = listening.at(line)
        assert (site.kind, site.calls, site.elements) == ("cast", 1, 7), line


def test_what_is_half_already_or_never_becomes_so_is_no_site(listening: Listening) -> None:
    x = torch.linspace(0, 1, 7)
    half = x.half()
    before = len(listening.sites())
    half.half(), half.to("cpu"), half.copy_(half.clone()), half.type_as(half)
    torch.zeros_like(half), half.new_zeros(3), half.float(), x.double().to(torch.float32)
    half.view(-1), half.view(torch.int16), torch.zeros(3), torch.tensor([1.0])
    assert len(listening.sites()) == before


def test_tensors_that_are_made_in_half(listening: Listening) -> None:
    line = here() + 1
    torch.arange(2100, dtype=torch.float16)
    torch.tensor([1e-9, 0.1, 1.0], dtype=torch.float16)
    torch.zeros(5, dtype=torch.bfloat16)
    torch.full((3,), -1e4 - 1, dtype=torch.float16)
    torch.ones(3).new_tensor([0.1], dtype=torch.float16)
    torch.randn(4, dtype=torch.bfloat16)
    (positions,), (constants,), (zeros,), (fill,), (new,), (drawn,) = (
        listening.at(line + n) for n in range(6)
    )
    kept = len(np.unique(np.arange(2100).astype(np.float16)))
    assert (positions.role, positions.merged) == ("whole numbers", 2100 - kept)
    assert (constants.role, constants.zeroed, constants.changed) == ("constants", 1, 2)
    assert (zeros.kind, zeros.op, zeros.elements) == ("made", "torch.zeros", 0)
    assert (fill.changed, fill.role) == (3, "constants")
    assert (new.kind, new.changed) == ("made", 1)
    assert drawn.kind == "made"


def test_default_dtype(listening: Listening) -> None:
    line = here() + 2
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.tensor([0.1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert [site.op for site in listening.at(line)] == ["torch.set_default_dtype"]
    assert [site.changed for site in listening.at(line + 1)] == [1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(x))
        return out


def test_a_module_by_parameter_and_buffer(listening: Listening) -> None:
    net = Net()
    line = here() + 1
    net.half()
    weights, buffers = listening.at(line)
    assert (weights.kind, weights.role, weights.op) == ("module", "weights", "Module.half")
    assert weights.names == ("first.weight", "first.bias", "norm.weight", "norm.bias")
    assert weights.elements == 3 * 4 + 3 * 4
    assert (buffers.role, buffers.names) == ("buffers", ("norm.running_mean", "norm.running_var"))
    line = here() + 1
    made = nn.Linear(3, 4, dtype=torch.bfloat16)
    assert {(site.kind, site.role) for site in listening.at(line)} == {("made", "weights")}
    assert made.weight.dtype is torch.bfloat16


def test_a_file_and_what_it_is_loaded_into(listening: Listening) -> None:
    stored = io.BytesIO()
    torch.save(OrderedDict(weight=torch.ones(2, 3).half(), bias=torch.ones(2)), stored)
    stored.seek(0)
    line = here() + 1
    state = torch.load(stored)
    nn.Linear(3, 2).load_state_dict(state)
    (site,) = listening.at(line)
    assert (site.kind, site.op, site.role) == ("loaded", "torch.load", "weights")
    line = here() + 1
    torch.from_numpy(np.ones(3, "e"))
    torch.frombuffer(bytearray(8), dtype=torch.float16)
    torch.zeros(4, dtype=torch.int16).view(torch.bfloat16)
    torch.as_tensor(np.ones(3, "e"))
    for number in range(4):
        assert [site.kind for site in listening.at(line + number)] == ["loaded"]
    line = here() + 1
    table = np.ones(3).astype(np.float16)
    assert table.dtype == np.float16
    (site,) = listening.at(line)
    assert (site.kind, site.op, site.dtype) == ("cast", "numpy.float16", "fp16")
    assert not listening.at(line + 1)  # it is named there, and nothing is cast


def test_moments_on_their_way_to_a_checkpoint(listening: Listening) -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(5, 3)).square().sum().backward()
    optimizer.step()
    held = optimizer.state_dict()["state"][0]
    line = here() + 1
    held["exp_avg_sq"].half()
    net.state_dict()["weight"].half()
    copy.deepcopy(optimizer.state_dict())["state"][0]["exp_avg_sq"].half()
    torch.rand(2, 3).half()
    (moments,), (weights,), (copied,), (other,) = (listening.at(line + n) for n in range(4))
    assert (copied.role, other.role) == ("moments", "data")
    assert (moments.role, moments.step, moments.prepares) == ("moments", 1, False)
    assert weights.role == "weights"


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(3).half() * index


@pytest.mark.slow
def test_what_comes_from_workers_is_a_site_where_it_is_asked_for(listening: Listening) -> None:
    line = here() + 1
    for batch in DataLoader(Rows(), num_workers=1):
        assert batch.dtype is torch.float16
    (site,) = listening.at(line)
    assert (site.kind, site.role) == ("loaded", "data")


def test_saved_activations(listening: Listening) -> None:
    weight = torch.ones(3, requires_grad=True)
    line = here() + 2
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: kept.half(),
        lambda kept: kept.float(),
    ):
        loss = (weight * weight).sum()
    loss.backward()
    (site,) = listening.at(line)
    assert (site.kind, site.role) == ("saved", "saved activations")
    assert site.calls == 2


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.half().float()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.bfloat16().float()


def test_casts_inside_a_function(listening: Listening) -> None:
    x = torch.ones(3, requires_grad=True)
    Rounded.apply(x).sum().backward()
    forward, backward = listening.sites()
    assert (forward.kind, forward.dtype, forward.role) == ("function", "fp16", "activations")
    assert (backward.kind, backward.dtype, backward.role) == ("function", "bf16", "gradients")


def test_autocast_names_the_op_and_the_module(listening: Listening) -> None:
    net = Net()
    data = torch.linspace(0, 1, 15).reshape(5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(data).square().mean()
    loss.backward()
    found = {(site.kind, site.op, site.role) for site in listening.sites()}
    assert ("autocast", "addmm", "weights") in found
    assert ("autocast", "addmm", "activations") in found
    assert {site.names for site in listening.sites() if site.op == "addmm"} == {("first",)}


def test_an_optimizer_in_half(listening: Listening) -> None:
    net = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(5, 3, dtype=torch.bfloat16)).square().sum().backward()
    line = here() + 1
    optimizer.step()
    states = [site for site in listening.at(line) if site.op == "Adam"]
    assert {(site.kind, site.role) for site in states} == {
        ("state", "weights"),
        ("state", "moments"),
    }


def test_a_sum_that_lives_on(listening: Listening) -> None:
    total = torch.zeros(3, dtype=torch.float16)
    line = here() + 2
    for _ in range(3):
        total += torch.ones(3, dtype=torch.float16)
    (site,) = [site for site in listening.at(line) if site.kind == "sum"]
    assert (site.op, site.calls) == ("add_", 3)


class Counts(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_a_cast_below_a_mode_counts_once(listening: Listening) -> None:
    x = torch.ones(3)
    with Counts():
        line = here() + 2
        for _ in range(3):
            x.half()
    assert [site.calls for site in listening.at(line)] == [3]


def test_the_fp32_control_is_no_site_of_its_own() -> None:
    found = Listening()
    with applied("fp32"), found.recorder.watching():
        x = torch.ones(3) / 3
        assert torch.equal(x.half(), x)
        assert torch.equal(x.to(torch.float16), x)
        assert torch.zeros(4, dtype=torch.int16).view(torch.float16).shape == (4,)
        with torch.device("cpu"):
            assert torch.zeros(2, dtype=torch.bfloat16).dtype is torch.float32
        assert nn.Linear(2, 2).half().weight.dtype is torch.float32
    assert not [site for site in found.sites() if site.kind != "loaded"]


def test_all_is_put_back() -> None:
    before = torch.Tensor.half, torch.zeros, torch.Tensor.view
    with Listening().recorder.watching():
        assert torch.zeros is not before[1]
    assert (torch.Tensor.half, torch.zeros, torch.Tensor.view) == before
    assert "half" not in vars(Tensor)


def test_controls_know_a_cast_that_is_listened_to() -> None:
    def moved(control: str) -> Tensor:
        found = Listening()
        with applied(control), found.recorder.watching():
            return torch.full((4,), 0.3).bfloat16().float()

    assert not torch.equal(moved("fp32;nudged"), moved("fp32"))

    found = Listening()
    with applied("fresh_casts"), found.recorder.watching():
        weight = nn.Parameter(torch.full((4,), 0.5))
        own = weight.bfloat16()
        weight.grad = torch.ones(4)
        torch.optim.SGD([weight], 0.25).step()
    assert own.tolist() == [0.25] * 4


def test_no_mark_is_written_into_a_checkpoint(listening: Listening) -> None:
    plain, marked = io.BytesIO(), io.BytesIO()
    torch.save(torch.full((4,), 2.0, dtype=torch.bfloat16), plain)
    torch.save((torch.ones(4, dtype=torch.bfloat16) + 1), marked)
    assert marked.getvalue() == plain.getvalue()


def test_an_object_of_the_scripts_is_read_once(listening: Listening) -> None:
    class Readings:
        reads = 0

        def __len__(self) -> int:
            return 2

        def __getitem__(self, place: int) -> float:
            self.reads += 1
            return (0.1, 0.2)[place]

    plain = Readings()
    torch._C._VariableFunctions.tensor(plain, dtype=torch.float16)
    line = here() + 1
    torch.tensor(heard := Readings(), dtype=torch.float16)
    assert heard.reads == plain.reads
    assert [site.elements for site in listening.at(line)] == [0]
