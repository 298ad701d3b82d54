"""Each intervention does what it says to a small training, nothing more, and is taken back.

The oracle is the same training written out by hand with the change in its own lines.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import mse_loss

from ampscope.capture.global_hooks import OPTIMIZER_POST, OPTIMIZER_PRE
from ampscope.errors import BadInput
from ampscope.policy.device_profiles import PROFILES
from ampscope.runner.controls import applied
from tests.helpers.script_watching import batch, equal, scaler, small_net, train, weights_of

PATCHED: list[tuple[Any, str]] = [
    *((torch.amp.GradScaler, name) for name in (
        "__init__", "scale", "unscale_", "step", "update", "get_scale", "load_state_dict")),
    (torch.Tensor, "backward"),
    *((torch.optim.Optimizer, name) for name in ("__init__", "add_param_group")),
    *((owner, name) for owner in (torch.nn.utils, torch.nn.utils.clip_grad)
      for name in ("clip_grad_norm_", "clip_grad_value_")),
    *((nn.Module, name) for name in ("__call__", "to", "half", "bfloat16")),
    *((torch, name) for name in (
        "set_default_dtype", "set_default_tensor_type", "from_numpy", "from_dlpack", "frombuffer",
        "HalfTensor", "BFloat16Tensor")),
    (torch._utils, "_rebuild_tensor"),
    (torch.autograd, "_engine_run_backward"),
    (torch.autograd.graph.saved_tensors_hooks, "__init__"),
    *((torch.amp.autocast_mode.autocast, name) for name in ("__enter__", "__exit__")),
]  # fmt: skip
WORDS = ("fp32", "bf16", "scale:8", "init_scale:8", "growth_interval:3", "add_scaler",
         "unscale_first", "lr:0.5", "eps:1e-3", "fp32_params", "fp32_state", "separate_scalers",
         "fresh_casts", "cleared_grads", "fp32_modules:0,2", "fp32_lines:train.py:1", "as_is",
         "scale:8;lr:0.5", "fp32;nudged", "repeat")  # fmt: skip


def _state() -> list[object]:
    own = [vars(owner).get(name) for owner, name in PATCHED]
    return [*own, len(OPTIMIZER_PRE.subscribers), len(OPTIMIZER_POST.subscribers)]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_taken_back(word: str, raises: bool) -> None:
    before = _state()
    with contextlib.suppress(KeyError), applied(word):
        if raises:
            raise KeyError("the script's own")
    assert all(a is b or a == b for a, b in zip(before, _state(), strict=True))


class _Halves(torch.autograd.Function):
    """Rounds in its backward pass."""

    seen: list[torch.dtype]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _Halves.seen.append(gradient.half().dtype)
        return gradient


@pytest.mark.parametrize("word", ["fp32", "bf16", f"fp32_lines:{Path(__file__).name}:LINE"])
@pytest.mark.parametrize("by", [Tensor.backward, torch.autograd.backward, torch.autograd.grad])
def test_what_a_script_casts_while_torch_calls_it(word: str, by: Callable[..., Any]) -> None:
    """Hooks, functions and recomputed modules run from inside a call of torch's, for which torch
    takes function modes off."""
    seen = _Halves.seen = []

    def cast(tensor: Tensor) -> Tensor:
        seen.append(tensor.half().dtype)  # LINE
        return tensor

    with applied(_at_lines(word)):
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(lambda gradient: [cast(gradient), None][1])
        with torch.autograd.graph.saved_tensors_hooks(cast, cast):
            made = weight.square()
        again = torch.utils.checkpoint.checkpoint(
            lambda x: cast(x).square(), made, use_reentrant=False
        )
        out = _Halves.apply(again).sum()
        by(out, *([weight] if by is torch.autograd.grad else []))
    wanted = {"bf16": torch.bfloat16}.get(word, torch.float32)
    assert len(seen) == 6  # packed; computed, and again; function; unpacked; hook
    own = [dtype for dtype in seen if dtype is not wanted]
    assert own == ([torch.float16] if "LINE" in word else [])  # the function's, on another line


def _at_lines(word: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.endswith("  # LINE"))
    return word.replace("LINE", str(number))


def _default_dtype(half: torch.dtype) -> torch.Tensor:
    torch.set_default_dtype(half)
    try:
        return torch.ones(3)
    finally:
        torch.set_default_dtype(torch.float32)


def _through_torch_save(half: torch.dtype) -> torch.Tensor:
    """Written before a control begins, as a checkpoint is."""
    file = io.BytesIO(STORED[half])
    loaded: torch.Tensor = torch.load(file)["w"]
    return loaded


def _through_safetensors(half: torch.dtype) -> torch.Tensor:
    return safetensors.torch.load(SAFE[half])["w"]


def _saved(half: torch.dtype) -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.ones(3, dtype=half)}, file)
    return file.getvalue()


STORED = {half: _saved(half) for half in (torch.float16, torch.bfloat16)}
SAFE = {h: safetensors.torch.save({"w": torch.ones(3, dtype=h)}) for h in STORED}
METHOD = {torch.float16: "half", torch.bfloat16: "bfloat16"}
CLASS_OF = {torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor"}
WAYS_TO_HALF: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "method": lambda half: getattr(torch.ones(3), METHOD[half])(),
    "to": lambda half: torch.ones(3).to("cpu", half),
    "factory": lambda half: torch.full((3,), 1.0, dtype=half),
    "type": lambda half: torch.ones(3).type(half),
    "type by name": lambda half: torch.ones(3).type(f"torch.{CLASS_OF[half]}"),
    "type by class": lambda half: torch.ones(3).type(getattr(torch, CLASS_OF[half])),
    "class": lambda half: getattr(torch, CLASS_OF[half])([1, 1, 1]),
    "module": lambda half: nn.Embedding.from_pretrained(torch.ones(3, 1)).to(half).weight.flatten(),
    "module's argument": lambda half: nn.init.ones_(nn.Linear(1, 3, dtype=half).weight).flatten(),
    "default dtype": _default_dtype,
    "torch.load": _through_torch_save,
    "safetensors": _through_safetensors,
    "bits": lambda half: torch.frombuffer(ONES[half], dtype=half),
    "view": lambda half: torch.tensor([int.from_bytes(ONES[half][:2], "little")] * 3,
                                      dtype=torch.int16).view(half),
}  # fmt: skip
ONES = {torch.float16: bytearray(b"\x00\x3c" * 3), torch.bfloat16: bytearray(b"\x80\x3f" * 3)}


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("way", WAYS_TO_HALF)
def test_no_way_to_half_passes_by_a_control(way: str, half: torch.dtype) -> None:
    """The numbers stay, and only what a control is to change is changed."""
    make = WAYS_TO_HALF[way]
    made = {}
    for word in ("fp32", "bf16"):
        with applied(word):
            made[word] = make(half).detach()
    assert {word: tensor.dtype for word, tensor in made.items()} == {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
    }
    assert all(tensor.tolist() == [1.0] * 3 for tensor in made.values())
    assert make(half).dtype is half  # outside


@pytest.mark.parametrize("name", ["from_numpy", "tensor", "as_tensor", "from_dlpack"])
def test_half_arrays_are_wide_in_fp32(name: str) -> None:
    with applied("fp32"):
        made = getattr(torch, name)(np.ones(3, np.float16))
    assert made.dtype is torch.float32
    assert made.tolist() == [1.0] * 3


@pytest.mark.parametrize("late", [False, True], ids=["before the optimizer", "after it"])
def test_parameters_that_are_cast_one_by_one_stay_in_fp32(late: bool) -> None:
    """As scripts do in a loop; what is frozen stays as the script has it."""
    with applied("fp32_params"):
        model, frozen = small_net(), nn.Linear(4, 4).requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if late else None
        for parameter in (*model.parameters(), *frozen.parameters()):
            parameter.data = parameter.data.half()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
        loss = model(frozen(torch.ones(2, 4).half()).float()).square().mean()
        loss.backward()
        optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    assert {p.dtype for p in frozen.parameters()} == {torch.float16}


def test_an_unknown_word_names_the_known_ones() -> None:
    with pytest.raises(BadInput, match="separate_scalers"), applied("as_is;faster"):
        pass


def _scales(own: torch.amp.GradScaler, steps: int = 6) -> list[float]:
    """The scale before each step of a training."""
    model, seen = small_net(), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    train(model, optimizer, own, lambda step: seen.append(own.get_scale()), steps)
    return seen


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("as_is", [4.0, 4.0, 8.0, 8.0, 16.0, 16.0]),
        ("scale:64", [64.0] * 6),
        ("init_scale:64", [64.0, 64.0, 128.0, 128.0, 256.0, 256.0]),
        ("growth_interval:3", [4.0, 4.0, 4.0, 8.0, 8.0, 8.0]),
    ],
)
def test_the_scale_follows_the_word(word: str, expected: list[float]) -> None:
    with applied(word):
        own = scaler(4.0, growth_interval=2)
        assert _scales(own) == expected


@pytest.mark.parametrize("early", [True, False])
def test_a_frozen_scale_survives_a_checkpoint(early: bool) -> None:
    other = scaler(4096.0)
    other.scale(torch.ones(1))
    with applied("scale:64"):
        own = scaler(4.0)
        if not early:
            own.scale(torch.ones(1))
        own.load_state_dict(other.state_dict())
        assert _scales(own, 2) == [64.0, 64.0]


def test_a_frozen_scale_still_skips_what_overflows() -> None:
    model = small_net()
    before = weights_of(model)
    with applied("scale:3e38"):
        train(model, torch.optim.SGD(model.parameters(), 1.0), scaler(), steps=6)
        skipped_all = equal(before, weights_of(model))
    largest = max(mse_loss(small_net()(batch(n)[0]), batch(n)[1]).item() for n in range(6))
    assert largest * 3e38 > torch.finfo(torch.float32).max
    assert not skipped_all  # the first loss is below 1, so its step is taken


def test_disabled_scalers_are_left_alone() -> None:
    for word in ("scale:64", "init_scale:64", "growth_interval:3"):
        with applied(word):
            own = torch.amp.GradScaler("cpu", enabled=False)
            assert own.get_scale() == 1.0


def _dtypes_under(control: str) -> list[torch.dtype]:
    """Dtypes of the outputs of a net's three modules under fp16 autocast."""
    model, seen = small_net(), []
    for module in model:
        module.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    with applied(control), torch.autocast("cpu", dtype=torch.float16):
        model(batch(0)[0])
    return seen


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ("as_is", [torch.float16] * 3),
        ("fp32", [torch.float32] * 3),
        ("bf16", [torch.bfloat16] * 3),
        ("fp32_modules:0", [torch.float32, torch.float32, torch.float16]),
        ("fp32_modules:2", [torch.float16, torch.float16, torch.float32]),
        ("fp32_modules:0,2", [torch.float32] * 3),
    ],
)
def test_precision_of_each_module(control: str, expected: list[torch.dtype]) -> None:
    assert _dtypes_under(control) == expected


class OnFakeDevice:
    """Modules and tensors without numbers, on a device that this machine lacks. Which dtype an op
    gives under autocast there is decided by torch's own dispatcher."""

    def __init__(self, kind: str) -> None:
        self.kind, self.mode = kind, FakeTensorMode()

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        return FakeTensor(self.mode, value.detach().to("meta"), torch.device(self.kind))

    def net(self, *modules: nn.Module) -> nn.Sequential:
        """Frozen, as autograd asks the device itself."""
        made = nn.Sequential(*modules).requires_grad_(False)
        for module in made:
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(self.tensor(parameter), requires_grad=False))
        return made


@pytest.fixture(params=["cuda", "mps", "xpu", "cpu"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OnFakeDevice:
    # Without a GPU torch refuses autocast on "cuda" before the dispatcher is asked.
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    return OnFakeDevice(request.param)


def test_parameters_in_fp32_compute_in_half_on_their_own_device(elsewhere: OnFakeDevice) -> None:
    """The fix opens autocast where the parameters are, and not for the CPU alone: else a half model
    on a GPU would be plain fp32, or mix dtypes, and be called a verified fix."""
    net, loss = elsewhere.net(nn.Linear(4, 4)), nn.Softmax(-1)
    x = elsewhere.tensor(torch.ones(2, 4))
    with elsewhere.mode, applied("fp32_params"):
        net.half()
        assert net[0].weight.dtype is torch.float32
        out = net(x)
        assert (out.dtype, out.device.type) == (torch.float16, elsewhere.kind)
        with torch.autocast(elsewhere.kind, torch.float16):
            expected = loss(out).dtype
        assert loss(out).dtype is expected  # without parameters: where its input is
        assert not torch.is_autocast_enabled("cpu")
    assert (expected is torch.float32) is (elsewhere.kind != "cpu")  # its list is another


def test_a_region_that_is_open_on_the_device_stays_as_it_is(elsewhere: OnFakeDevice) -> None:
    net, x = elsewhere.net(nn.Linear(4, 4)), elsewhere.tensor(torch.ones(2, 4))
    with elsewhere.mode, applied("fp32_params"):
        net.half()
        with torch.autocast(elsewhere.kind, torch.bfloat16):
            assert net(x).dtype is torch.bfloat16


def test_a_device_without_autocast_ends_no_training() -> None:
    with applied("fp32_params"):
        net = nn.Linear(4, 4, device="meta").half()
        assert net(torch.ones(2, 4, device="meta")).dtype is torch.float32


def test_modules_and_lines_in_fp32_are_so_on_any_device(elsewhere: OnFakeDevice) -> None:
    net, x = elsewhere.net(nn.Linear(4, 4), nn.Linear(4, 4)), elsewhere.tensor(torch.ones(2, 4))
    seen: list[torch.dtype] = []
    for module in net:
        module.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    with elsewhere.mode, torch.autocast(elsewhere.kind, torch.float16):
        with applied("fp32_modules:1"):
            net(x)
        with applied(f"fp32_lines:{Path(__file__).name}:{_line() + 1}", str(Path(__file__).parent)):
            line = torch.mm(x, x.T)
        assert torch.mm(x, x.T).dtype is torch.float16
    assert seen == [torch.float16, torch.float32]
    assert line.dtype is torch.float32


def test_a_line_in_fp32_leaves_its_own_casts_out() -> None:
    x = torch.ones(2, 2)
    with applied(f"fp32_lines:{Path(__file__).name}:{_line() + 1}", str(Path(__file__).parent)):
        made = x.half(), x.to(torch.bfloat16), x.type("torch.HalfTensor"), nn.Linear(2, 2).half()
    assert {made[0].dtype, made[1].dtype, made[2].dtype, made[3].weight.dtype} == {torch.float32}
    assert x.half().dtype is torch.float16


# Each writes into memory that the script goes on to use, or asks for the tensor itself.
class _HalfIds(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(5001 + 2 * index).half()


def test_what_the_workers_of_a_loader_round_is_lifted_with_the_line_that_takes_it() -> None:
    loader = torch.utils.data.DataLoader(
        _HalfIds(), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    number = 1 + next(
        n for n, line in enumerate(Path(__file__).read_text().splitlines())
        if line.endswith("[*loader]")
    )  # fmt: skip
    with applied(f"fp32_lines:{Path(__file__).name}:{number}"):
        lifted = [*loader]
    assert torch.cat(lifted).tolist() == [5001.0, 5003.0, 5005.0, 5007.0]
    assert torch.cat([*loader]).tolist() == [5000.0, 5004.0, 5004.0, 5008.0]


_WRITES: dict[str, Callable[[Tensor], object]] = {
    "item": lambda p: p.detach().__setitem__(1, 5.0),
    "out": lambda p: torch.add(p.detach(), 1.0, out=p.detach()),
    "data": lambda p: p.data.add_(torch.ones(4)),
    "view": lambda p: p.data.view(2, 2).mul_(3.0),
    "slice": lambda p: p.data[1:3].add_(1.0),
    "chunk": lambda p: p.data.chunk(2)[0].fill_(5.0),
    "list": lambda p: torch._foreach_add_([p.data], 1.0),
    "bits": lambda p: p.data.view(torch.int16).zero_(),
    "copy": lambda p: p.data.copy_(torch.full((4,), 7.0)),
    "gradient": lambda p: p.grad.mul_(0.25),  # type: ignore[union-attr]
    "set gradient": lambda p: setattr(p, "grad", p.grad * 0.5),  # type: ignore[operator]
    "clip": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "asked": lambda p: setattr(p, "grad", torch.autograd.grad((p * 3).sum(), p)[0]),
    "hook": lambda p: (p.register_hook(lambda g: g * 2), (p * 2).sum().backward()),
    "running statistics": lambda p: nn.functional.batch_norm(
        torch.ones(8, 4).half(), p.data, p.data.clone(), training=True, momentum=0.5
    ),
}


@pytest.mark.parametrize("name", _WRITES)
def test_what_a_line_in_fp32_writes_is_written(name: str) -> None:
    write = _WRITES[name]
    first = write.__code__.co_firstlineno
    numbers = {n for _, _, n in write.__code__.co_lines() if n is not None} | {first}
    lines = ",".join(f"{Path(__file__).name}:{n}" for n in numbers)
    left = []
    for control in ("as_is", f"fp32_lines:{lines}"):
        p = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float16))
        p.grad = torch.ones(4, dtype=torch.float16)
        before = p.detach().clone(), p.grad.clone()
        with applied(control, str(Path(__file__).parent)) as missing:
            write(p)
        assert not set().union(*missing)
        assert p.grad is not None
        left.append((p.detach(), p.grad))
        assert not all(map(torch.equal, before, left[-1]))
    assert all(map(torch.equal, *left))
    assert {t.dtype for t in left[1]} == {torch.float16}


def _line() -> int:
    """Number of the caller's line."""
    return sys._getframe(1).f_lineno


@pytest.mark.parametrize("word", WORDS)
def test_a_script_is_told_the_stand_in_device(word: str, stand_in: Callable[..., Any]) -> None:
    """A mode passes on what the script asks: with ampscope as the asker, all is on the CPU."""
    here = f"{Path(__file__).name}:{sys._getframe().f_lineno + 3}"
    word = word.replace("train.py:1", here)
    with stand_in(PROFILES["a100"]), applied(word, str(Path(__file__).parent)):
        assert str(torch.ones(2).cuda().mul_(2.0).device) == "cuda:0"


def test_controls_ask_cuda_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask whether there is a device may take one, or keep a script from forking later."""

    def asked(*args: object) -> bool:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    model = small_net()
    for word in ("fp32_params", "fp32_modules:0", "op_lists:softmax=half"):
        with applied(word):
            model(batch(0)[0])


def test_a_widened_module_of_a_half_model_fits_to_its_neighbours_at_every_step() -> None:
    model, inside = small_net().half(), []
    model[0].register_forward_hook(lambda m, i, o: inside.append(o.dtype))
    with applied("fp32_modules:0"):
        outputs = [model(batch(n)[0].half()) for n in range(3)]
    assert inside == [torch.float32] * 3
    assert [out.dtype for out in outputs] == [torch.float16] * 3


def test_epsilons_are_raised_where_they_are_smaller() -> None:
    with applied("eps:1e-3"):
        norms = [nn.LayerNorm(4, eps=eps) for eps in (1e-6, 1e-2)]
        for norm in norms:
            norm(torch.ones(2, 4))
        model = small_net()
        optimizer = torch.optim.Adam(model.parameters(), eps=1e-8)
        train(model, optimizer, scaler(), steps=1)
        zero = torch.zeros(1)
        assert [n.eps for n in norms] == [1e-3, 1e-2]
        assert optimizer.param_groups[0]["eps"] == 1e-3
        assert float(zero + 1e-8) == pytest.approx(1e-3)
        assert float(zero + 0.5) == 0.5
    assert float(zero + 1e-8) == pytest.approx(1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["autocast", "cast"])
def test_one_rounded_input_is_moved_once_and_nothing_is_drawn(
    dtype: torch.dtype, form: str
) -> None:
    def seen(control: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with applied(control):
            torch.manual_seed(0)
            ids = torch.arange(3000.0, 3064.0).to(dtype).float()
            x, weight = torch.rand(64, 8), torch.eye(8)
            made = []
            for _ in range(2):
                if form == "cast":
                    made.append(x.to(dtype).float())
                    continue
                with torch.autocast("cpu", dtype):
                    made.append(torch.mm(x, weight).float())
            return ids, made[0], made[1], torch.rand(3)

    plain, moved = seen("fp32"), seen("fp32;nudged")
    assert torch.equal(plain[0], moved[0])  # whole numbers stay what they are
    assert torch.equal(plain[2], moved[2])  # the second time
    assert torch.equal(plain[3], moved[3])  # the generator
    relative = ((moved[1] - plain[1]) / plain[1]).abs()
    assert 0 < float(relative.max()) < 2.0**-17  # a 32nd of what rounding to fp16 changes at most
    kept = plain[1].to(dtype).float() == plain[1]
    assert torch.equal(plain[1][kept], moved[1][kept])


def test_a_table_of_ids_in_half_is_not_what_is_moved() -> None:
    with applied("fp32;nudged"):
        table = torch.tensor([[2049.0, 0.3], [2050.0, 0.6]]).to(torch.float16).float()
    assert table[:, 0].tolist() == [2049.0, 2050.0]
    assert table[:, 1].tolist() != [torch.tensor(0.3).item(), torch.tensor(0.6).item()]
