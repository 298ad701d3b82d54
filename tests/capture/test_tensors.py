"""The door that every tensor passes: what is read, what is left alone and why, and no crash."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import _get_sequence_nr
from torch.utils._mode_utils import no_dispatch

import ampscope
from ampscope.capture.accumulator import Accumulator
from ampscope.capture.comparisons import Comparisons
from ampscope.capture.failures import Failures
from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from ampscope.capture.script import op_facts
from ampscope.capture.script.optimizer_facts import nonfinite_count
from ampscope.capture.script.optimizer_steps import WeightMotion, gradient_facts
from ampscope.capture.script.script_scans import scan
from ampscope.capture.tensors import (
    Unreadable,
    all_finite,
    floating_tensors,
    has_own_memory,
    holds_numbers,
    is_capturing,
    numbers,
    opened,
    plain,
    readable,
    unreadable,
)
from ampscope.capture.weights import count_updates, gradient_norm
from ampscope.records import Cadence, Role
from ampscope.runner.script_recorder import ScriptRecorder
from ampscope.watcher.capsule import CapsuleLimits, collected
from ampscope.watcher.gradient_norms import start_norms
from ampscope.watcher.packed_values import packed
from tests.helpers.watched import recorded
from tests.helpers.wrapper_tensors import Float8Weight, Int8Weight, Opaque, Tagged, Twins

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(prototype|beta|experimental|deprecat|Sparse).*"),
]


def freed() -> Tensor:
    tensor = torch.randn(64, 64)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> Tensor:
    tensor = torch.randn(64, 64)
    tensor.untyped_storage().resize_(100)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.randn(64, 64)


def functional() -> Tensor:
    tensor = torch.randn(4, 4)
    torch._enable_functionalization(reapply_views=False)
    try:
        return torch._to_functional_tensor(tensor)
    finally:
        torch._disable_functionalization()


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)


def packed_floats() -> Tensor:
    return torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


def int8_weight() -> Tensor:
    return Int8Weight(torch.ones(4, 4, dtype=torch.int8), torch.ones(4))


def coo(values: Tensor) -> Tensor:
    places = torch.ones(1, len(values), dtype=torch.int64, device=values.device)
    return torch.sparse_coo_tensor(places, values, (5,), check_invariants=False)


def jagged(values: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))


def detached() -> Tensor:
    with no_dispatch():
        return Float8Weight(torch.randn(64)).detach()


def nested_with_gaps() -> Tensor:
    rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    return rows.transpose(1, 2)


def jagged_with_gaps() -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged
    return rows(torch.randn(9, 2), torch.tensor([0, 4, 9]), lengths=torch.tensor([2, 5]))


CLOSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "meta": (lambda: torch.randn(64, 64, device="meta"), "meta tensor"),
    "detached with dispatch off": (detached, "memory was given back"),
    "meta sparse": (lambda: coo(torch.empty(1, device="meta")), "meta tensor"),
    "fake": (fake, "FakeTensor"),
    "functional": (functional, "not computed yet"),
    "freed": (freed, "memory was given back"),
    "shrunk": (shrunk, "memory was given back"),
    "zeros without memory": (lambda: torch._efficientzerotensor(64), "zeros that have no memory"),
    "quantized": (quantized, "quantized"),
    "packed": (packed_floats, "several to a byte"),
    "int8 weight": (int8_weight, "Int8Weight"),
    "opaque": (lambda: Opaque(torch.randn(4, 4)), "Opaque"),
    "twins": (lambda: Twins(torch.randn(4), torch.randn(4)), "Twins"),
    "around freed": (lambda: Float8Weight(freed()), "memory was given back"),
    "around meta": (lambda: Float8Weight(torch.randn(4, device="meta")), "meta tensor"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "no shape yet"),
    "nested with gaps": (nested_with_gaps, "gaps"),
    "jagged with gaps": (jagged_with_gaps, "NestedTensor"),
}

OPEN: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "plain": (lambda: torch.tensor([1.0, -2.0]), [1, -2]),
    "parameter": (lambda: nn.Parameter(torch.tensor([1.0, -2.0])), [1, -2]),
    "buffer": (lambda: nn.Buffer(torch.tensor([1.0])), [1]),
    "subclass": (lambda: torch.tensor([1.0, 4.0]).as_subclass(Tagged), [1, 4]),
    "float8 weight": (lambda: Float8Weight(torch.tensor([1.0, 2.0])), [1, 2]),
    "float8 parameter": (lambda: nn.Parameter(Float8Weight(torch.tensor([3.0]))), [3]),
    "around a view": (lambda: Float8Weight(torch.arange(6.0).view(2, 3).T), [0, 3, 1, 4, 2, 5]),
    "complex": (lambda: torch.tensor([1 + 2j]), [1, 2]),
    "conjugate": (lambda: torch.tensor([1 + 2j]).conj(), [1, -2]),
    "negative": (lambda: torch.tensor([1 + 2j]).conj().imag, [-2]),
    "coo": (lambda: coo(torch.tensor([3.0, 4.0])), [7]),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), [1, 1, 1]),
    "csc": (lambda: torch.eye(3).to_sparse_csc(), [1, 1, 1]),
    "bsr": (lambda: torch.eye(2).to_sparse_bsr((1, 1)), [1, 1]),
    "bsc": (lambda: torch.eye(2).to_sparse_bsc((1, 1)), [1, 1]),
    "mkldnn": (lambda: torch.tensor([1.0, 2.0]).to_mkldnn(), [1, 2]),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)]), [1, 0, 0]),
    "jagged": (lambda: jagged(torch.tensor([1.0, 0.0, 0.0])), [1, 0, 0]),
    "expanded": (lambda: torch.tensor([[2.0]]).expand(2, 2), [2, 2, 2, 2]),
    "overlapping": (lambda: torch.arange(3.0).as_strided((2, 2), (1, 1)), [0, 1, 1, 2]),
    "strided slice": (lambda: torch.arange(6.0)[1::2], [1, 3, 5]),
    "empty": (lambda: torch.empty(0, 3), []),
    "empty without memory": (lambda: torch.empty(4).expand(0, 4), []),
    "inference": (lambda: torch.inference_mode()(lambda: torch.ones(2))(), [1, 1]),
    "fp64": (lambda: torch.tensor([0.5], dtype=torch.float64), [0.5]),
    "fp16": (lambda: torch.tensor([0.5], dtype=torch.float16), [0.5]),
    "bf16": (lambda: torch.tensor([0.5], dtype=torch.bfloat16), [0.5]),
    "e4m3": (lambda: torch.tensor([0.5]).to(torch.float8_e4m3fn), [0.5]),
    "e5m2": (lambda: torch.tensor([0.5]).to(torch.float8_e5m2), [0.5]),
    "e4m3fnuz": (lambda: torch.tensor([0.5]).to(torch.float8_e4m3fnuz), [0.5]),
    "e8m0": (lambda: torch.tensor([0.5]).to(torch.float8_e8m0fnu), [0.5]),
    "complex32": (lambda: torch.tensor([1 + 2j]).to(torch.complex32), [1, 2]),
    "int64": (lambda: torch.tensor([3]), [3]),
    "uint16": (lambda: torch.tensor([3], dtype=torch.uint16), [3]),
    "uint64": (lambda: torch.tensor([3], dtype=torch.uint64), [3]),
    "bool": (lambda: torch.tensor([True]), [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_what_has_no_numbers_is_refused_with_a_reason(name: str) -> None:
    make, reason = CLOSED[name]
    tensor = make()
    assert reason in unreadable(tensor)
    assert opened(tensor) is None
    assert readable(tensor) is None
    assert not holds_numbers(tensor)
    assert not has_own_memory(tensor)
    for read in (numbers, plain):
        with pytest.raises(Unreadable, match=reason):
            read(tensor)


@pytest.mark.parametrize("name", OPEN)
def test_what_has_numbers_is_opened(name: str) -> None:
    make, expected = OPEN[name]
    tensor = make()
    assert not unreadable(tensor)
    values = readable(tensor)
    assert values is not None
    assert type(values) is Tensor
    assert values.layout is torch.strided
    assert not values.requires_grad
    assert values.double().flatten().tolist() == expected


def test_no_address_is_taken_of_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(self: Tensor) -> int:
        raise AssertionError("an address was taken")

    tensors = [make() for make, _ in CLOSED.values()]
    monkeypatch.setattr(Tensor, "data_ptr", address)
    for tensor in tensors:
        assert unreadable(tensor)
        counts = Accumulator(Failures())
        counts.add(Role.ACTIVATION, 0, tensor)
        assert counts.take(0, 1.0) == {}


def test_inside_transformations_of_torch_func() -> None:
    reasons = []

    def looked_at(x: Tensor) -> Tensor:
        reasons.append(unreadable(x))
        assert floating_tensors(x) == []
        return x.sum()

    torch.func.grad(looked_at)(torch.ones(3))
    torch.vmap(looked_at)(torch.ones(3, 2))
    torch.func.jvp(looked_at, (torch.ones(3),), (torch.ones(3),))
    torch.func.grad(torch.func.grad(looked_at))(torch.tensor(2.0))
    assert all("torch.func" in reason for reason in reasons)
    assert reasons


class NoGradients(torch.autograd.Function):
    """Gives its input no gradient, and is given none where its output's was not needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(None if grad is None else grad * 2 for grad in grads)


class Half(nn.Module):
    """Two outputs, of which the loss takes one: the other's hooks are called with None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.split = Split()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.first(x), self.second(x))


class Split(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        x, y = NoGradients.apply(x, y)
        return NoGradients.apply(x, y)


@pytest.mark.parametrize("every", [0, 1])
def test_gradients_that_are_none_are_no_error(tmp_path: Path, every: int) -> None:
    def train(store: Path | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = ampscope.watch(model, optimizer, store=store, every=every) if store else None
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4))[0].square().mean().backward()
            optimizer.step()
        if run is not None:
            run.close()
            found = recorded(run.store, run.id)
            assert len(found.steps) == 3
            assert not found.of("note")
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, train(None), train(tmp_path / "runs.db")))


def instruments(tensor: Tensor, folder: Path) -> Iterator[Callable[[], object]]:
    """Everything in capture/ and watcher/ that reads a tensor which training hands it."""

    class Holder(nn.Module):
        """Holds ``tensor`` as a gradient, whatever it is."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    class Stand:
        def __init__(self, grad: Tensor) -> None:
            self.grad = grad

    counts, comparisons, motion = Accumulator(Failures()), Comparisons(0), WeightMotion()
    for role in (Role.ACTIVATION, Role.WEIGHT, Role.WEIGHT_GRAD):
        yield lambda role=role: counts.add(role, 0, tensor, stable=True)
    yield counts.flush
    yield lambda: counts.take(0, 1.0)
    yield lambda: floating_tensors({"a": [tensor]})
    yield lambda: all_finite(tensor)
    yield lambda: op_facts.tensors([tensor], {"out": tensor})
    yield lambda: op_facts.scalars((tensor,), {})
    yield lambda: gradient_facts([Stand(tensor)], 1.0)  # type: ignore[list-item]  # has a grad
    yield lambda: gradient_norm(_names(Holder(), tensor))
    yield lambda: nonfinite_count([tensor] if holds_numbers(tensor) else [])
    yield lambda: scan("end", "buffer", "it", tensor) if holds_numbers(tensor) else None
    yield lambda: motion.start([tensor], is_wanted=True)
    yield motion.measured
    yield lambda: count_updates(counts, [(0, p, before) for p, before in motion.take()])
    yield lambda: start_norms({0: tensor}, None).check({0: tensor})
    yield lambda: packed({"x": (tensor,)}, "args", {})
    yield lambda: collected(_about(), [], {"w": tensor}, [], CapsuleLimits(), without_weights="")
    if (values := opened(tensor)) is not None and values.is_floating_point():
        yield lambda: comparisons.add(0, Role.ACTIVATION, plain(tensor), plain(tensor).float(), 1.0)
        yield comparisons.records


def _names(module: nn.Module, gradient: Tensor) -> ModelMap:
    names = ModelMap(module)
    for parameter in names.parameters:
        object.__setattr__(parameter, "tensor", type("Stand", (), {"grad": gradient})())
    return names


def _about() -> object:
    from ampscope.watcher.capsule import About

    return About("run", 0, 0, "loss", "why", 1.0, "native", torch.__version__)


@pytest.mark.parametrize("name", [*CLOSED, *OPEN])
def test_no_instrument_fails_on_any_kind_of_tensor(name: str, tmp_path: Path) -> None:
    make = (CLOSED.get(name) or OPEN[name])[0]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for number, look in enumerate(instruments(make(), tmp_path)):
            try:
                look()
            except Exception as error:
                raise AssertionError(f"instrument {number}") from error


@pytest.mark.parametrize(
    "kind", [Float8Weight, Opaque, Twins, Int8Weight], ids=lambda k: k.__name__
)
def test_a_model_of_wrapped_weights_is_watched_and_trains_the_same(
    kind: type, tmp_path: Path
) -> None:
    """The weight of one layer is a wrapper that the loop fills by hand, as an all-gather does."""

    def train(store: Path | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        values = model[0].weight.detach().clone()
        inner = {
            "Twins": lambda: (values, values.clone()),
            "Int8Weight": lambda: ((values * 100).to(torch.int8), torch.full((4,), 0.01)),
        }.get(kind.__name__, lambda: (values,))()
        model[0].weight = nn.Parameter(kind(*inner), requires_grad=False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        run = ampscope.watch(model, optimizer, store=store, every=1) if store else None
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        if run is not None:
            run.close()
            found = recorded(run.store, run.id)
            assert len(found.steps) == 4
            notes = [e.text for e in found.of("note")]
            assert any("left alone" in text for text in notes) == (kind is not Float8Weight)
        return [p.detach().clone() for p in model.parameters() if p.requires_grad]

    assert all(map(torch.equal, train(None), train(tmp_path / "runs.db")))


def test_random_strides_and_offsets_are_counted_whole(tmp_path: Path) -> None:
    """Whatever view of a storage: as many counts as elements, and the right ones."""
    chance = np.random.default_rng(0)
    base = torch.randn(400)
    for _ in range(300):
        shape = tuple(int(n) for n in chance.integers(0, 4, chance.integers(0, 4)))
        strides = tuple(int(n) for n in chance.integers(0, 7, len(shape)))
        view = base.as_strided(shape, strides, int(chance.integers(0, 300)))
        counts = Accumulator()
        counts.add(Role.WEIGHT, 0, view)
        (frame,) = counts.take(0, 1.0).values()
        whole = Accumulator()
        whole.add(Role.WEIGHT, 0, view.clone(memory_format=torch.contiguous_format))
        (expected,) = whole.take(0, 1.0).values()
        np.testing.assert_array_equal(frame.rows, expected.rows)
        assert frame.rows.sum() == view.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite_is_what_isfinite_says_of_every_element(dtype: torch.dtype) -> None:
    """Also where the sum of finite numbers overflows, and where two infinities cancel."""
    largest = torch.finfo(dtype).max
    fillings = [(), (largest,) * 7, (-largest,) * 7, (math.inf,), (-math.inf,), (math.nan,)]
    fillings += [(math.inf, -math.inf), (largest, math.inf), (-largest, math.nan)]
    for shape in ((0,), (), (9,), (40, 50)):
        for filling in fillings:
            tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
            flat = tensor.view(-1)
            for place, value in enumerate(filling[: flat.numel()]):
                flat[(place * 37) % flat.numel()] = value
            expected = bool(np.isfinite(tensor.double().numpy()).all())
            for seen in (tensor, tensor.requires_grad_(), tensor[..., None].expand(*shape, 2)):
                assert all_finite(seen) is expected, (shape, filling)


def test_whether_a_graph_is_recorded_is_asked_without_starting_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    states = {"is_initialized": False, "is_current_stream_capturing": True}

    def answer(name: str) -> Callable[[], bool]:
        return lambda: asked.append(name) or states[name]

    for name in states:
        monkeypatch.setattr(torch.cuda, name, answer(name))
    assert not is_capturing()
    assert asked == ["is_initialized"]
    states["is_initialized"] = True
    assert is_capturing()
    states["is_current_stream_capturing"] = False
    assert not is_capturing()


def test_a_look_makes_no_node_of_autograd() -> None:
    """Autograd numbers its nodes, and ops are found by these numbers."""
    weight = torch.ones(3, requires_grad=True)
    before = _get_sequence_nr()
    assert all_finite(weight)
    assert all_finite(weight * 2)
    assert _get_sequence_nr() - before == 1  # of the product


class Around(nn.Module):
    """Hands a tensor of any kind through a module, and holds it as a buffer."""

    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.register_buffer("held", held)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"out": [self.inner(x)], "held": self.held}


USES: dict[str, Callable[[Tensor], object]] = {
    "module": lambda t: Around(t)(t)["out"],
    "layer": lambda t: nn.Linear(4, 4)(t),
    "double": lambda t: t * 2,
    "add": lambda t: t + t,
    "half": lambda t: t.half(),
    "float": lambda t: t.to(torch.float32),
    "sum": lambda t: t.sum(),
    "norm": torch.linalg.vector_norm,
    "divide": lambda t: 1.0 / t,
    "exp_in_half": lambda t: t.to(torch.bfloat16).exp(),
    "write": lambda t: t.detach().mul_(1.0),
    "fill": lambda t: t.detach().masked_fill_(t.detach() > 0, 1.0),
    "copy": lambda t: torch.zeros(2, 2).copy_(t),
    "clone": lambda t: t.clone(),
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "matmul": lambda t: t @ t,
    "cat": lambda t: torch.cat([t, t]),
    "stack": lambda t: torch.stack([t, t]),
    "foreach": lambda t: torch._foreach_mul([t, t], 2.0),
    "item": lambda t: t.sum().item(),
    "isfinite": lambda t: torch.isfinite(t).all(),
    "clip": lambda t: torch.nn.utils.clip_grad_norm_([_with_gradient(t)], 1.0),
    "optimizer": lambda t: torch.optim.SGD([_with_gradient(t)], lr=0.1).step(),
    "adam": lambda t: torch.optim.AdamW([_with_gradient(t)], foreach=True).step(),
    "scaler": lambda t: _scaled_step(_with_gradient(t)),
    "backward": lambda t: (t.detach().requires_grad_() * 2.0).sum().backward(),
}


def _with_gradient(tensor: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor.detach())
    parameter.grad = tensor.detach().clone()
    return parameter


def _scaled_step(parameter: nn.Parameter) -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def told(use: Callable[[Tensor], object], make: Callable[[], Tensor]) -> str:
    """What became of it: the kind of the result, or torch's own error."""
    torch.manual_seed(0)
    try:
        result = use(make())
    except Exception as error:
        text = re.sub(r"\bj\d+", "j", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        # torch prints the function that it found under the method's name.
        return re.sub(r"<(?:function|method) \W*(?:Tensor\.)?(\w+)[^>]*>", r"\1", text)
    found = torch.utils._pytree.tree_leaves(result)
    words = " ".join(
        f"{type(r).__name__} {r.dtype} {_shape(r)}" if isinstance(r, Tensor) else repr(r)
        for r in found
    )
    return re.sub(r"\bj\d+", "j", words)  # each jagged dimension has a number of its own


def _shape(tensor: Tensor) -> object:
    has_none = isinstance(tensor, nn.parameter.UninitializedParameter) or (
        tensor.is_nested and tensor.layout is torch.strided
    )
    return "no shape" if has_none else tuple(tensor.shape)


@contextlib.contextmanager
def of_a_script(op_step: int | None) -> Iterator[None]:
    recorder = ScriptRecorder("", Cadence(), lambda count: None, op_step=op_step)
    with recorder.watching():
        yield


@contextlib.contextmanager
def of_a_probe() -> Iterator[None]:
    trace = OpTrace(ModelMap(nn.Identity()))
    with trace:
        yield
    trace.take()


# torch itself reads through a null pointer there.
NO_MEMORY = {"freed", "shrunk", "around freed", "detached with dispatch off"}
LIVE: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "script": lambda: of_a_script(None),
    "digests": lambda: of_a_script(0),
    "trace": of_a_probe,
}


@pytest.mark.parametrize("name", [n for n in (*CLOSED, *OPEN) if n not in NO_MEMORY])
@pytest.mark.parametrize("instrument", LIVE)
def test_a_script_gets_from_torch_what_it_gets_unwatched(instrument: str, name: str) -> None:
    """Any op on any kind of tensor: the same kind of result, or the same error."""
    make = (CLOSED.get(name) or OPEN[name])[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = {use: told(call, make) for use, call in USES.items()}
        with LIVE[instrument]():
            watched = {use: told(call, make) for use, call in USES.items()}
    assert watched == alone


def test_a_look_for_tracers_prints_nothing() -> None:
    """torch's own function logs a warning at its first call in a process."""
    code = "from ampscope.capture.tensors import is_traced; assert not is_traced()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


class _Meta:
    """A plain class with attributes of its own, as MONAI mixes one into its tensors."""

    affine = 1.0


class _Mixed(_Meta, Tensor):
    pass


def test_a_tensor_class_with_a_plain_class_mixed_in_is_read() -> None:
    mixed = torch.ones(3).as_subclass(_Mixed)
    mixed.affine = 2.0
    assert readable(mixed) is not None
    assert not all_finite(torch.full((3,), torch.nan).as_subclass(_Mixed))
