"""No mode of a training's own sees what instruments compute: its counts and noise are the plain
run's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import mse_loss
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ampscope
from ampscope.capture.own_ops import own_ops, script_ops
from ampscope.records import Cadence
from ampscope.runner.script_recorder import ScriptRecorder
from ampscope.store.reader import Reader

HERE = str(Path(__file__).parent)


def _noisy(self: Any, name: str, out: Any) -> Any:
    """``out`` with noise from the mode's own generator, where it is the result of a sum."""
    self.seen.append(name)
    if isinstance(out, Tensor) and out.is_floating_point() and name in ("addmm", "sum", "linear"):
        return out + 1e-3 * torch.rand(out.shape, generator=self.made).to(out.dtype)
    return out


class Dispatched(TorchDispatchMode):
    """Names every op and makes sums noisy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.made = torch.Generator().manual_seed(3)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return _noisy(self, str(func.__name__).split(".")[0], func(*args, **(kwargs or {})))


class Called(TorchFunctionMode):
    """Names every public function and attribute, and makes sums noisy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.made = torch.Generator().manual_seed(3)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", str(func))
        return _noisy(self, name, func(*args, **(kwargs or {})))


def _trained(
    mode: Any, watching: Callable[[nn.Module, Any, Any], Any], *, around: bool
) -> tuple[list[object], list[str]]:
    """Losses, norms, scales and weights of a training with overflows below ``mode``, and what the
    mode has seen. ``around``: it is entered before the watching, and not in each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    found: list[object] = []
    outer, inner = (mode, contextlib.nullcontext()) if around else (contextlib.nullcontext(), mode)
    with outer, watching(model, optimizer, scaler):
        for step in range(5):
            x, y = torch.randn(8, 16), torch.randn(8, 4)
            x = x * 1e30 if step == 4 else x  # a step that is bad at any scale
            with inner:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16):
                    loss = mse_loss(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                with torch.no_grad():
                    metric = model(y.repeat(1, 4)).sum()
            found += [repr(loss.item()), repr(float(norm)), scaler.get_scale(), metric.item()]
    return [*found, *(p.tolist() for p in model.parameters())], mode.seen


def _plain(model: nn.Module, optimizer: Any, scaler: Any) -> Any:
    return contextlib.nullcontext()


def _recorded(model: nn.Module, optimizer: Any, scaler: Any) -> Any:
    cadence = Cadence(histogram=1, trace=1, shadow=0)
    return ScriptRecorder(HERE, cadence, lambda step: None, op_step=1).watching()


@pytest.mark.parametrize("around", [False, True], ids=["in each step", "around all"])
@pytest.mark.parametrize("kind", [Dispatched, Called])
@pytest.mark.filterwarnings("ignore::ampscope.watcher.alarms.AmpscopeWarning")
def test_a_watched_training_is_the_plain_one_below_a_mode(
    kind: Callable[[], Any], around: bool, tmp_path: Path
) -> None:
    def watched(*what: Any) -> Any:
        return ampscope.watch(*what, every=1, store=tmp_path / "runs.db", guard=True)

    assert _trained(kind(), watched, around=around) == _trained(kind(), _plain, around=around)


@pytest.mark.parametrize("kind", [Dispatched, Called])
def test_a_recorded_training_is_the_plain_one_below_a_mode(kind: Callable[[], Any]) -> None:
    assert _trained(kind(), _recorded, around=False) == _trained(kind(), _plain, around=False)


def test_what_the_script_is_called_with_meanwhile_runs_below_its_modes() -> None:
    x = torch.ones(2)
    with Called() as called, Dispatched() as dispatched:
        with own_ops() as is_outermost:
            x.sin()
            with own_ops() as is_inner:
                x.cos()
                with script_ops():
                    x.tan()
                    with own_ops():
                        x.sin()
                    x.abs()
                x.cos()
            x.sin()
        x.exp()
    assert (is_outermost, is_inner) == (True, False)
    assert dispatched.seen == called.seen == ["tan", "abs", "exp"]


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_no_tracer_takes_up_what_is_ampscopes(pre_dispatch: bool) -> None:
    def traced(x: Tensor) -> Tensor:
        with own_ops():
            x.sin()
        return x.cos()

    code = make_fx(traced, pre_dispatch=pre_dispatch)(torch.ones(2)).code
    assert "cos" in code
    assert "sin" not in code


@pytest.mark.filterwarnings("ignore::ampscope.watcher.alarms.AmpscopeWarning")
def test_graphs_that_fx_makes_of_a_watched_model_are_the_plain_ones(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def gradients(x: Tensor) -> Any:
        return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    def graphs() -> list[str]:
        return [torch.fx.symbolic_trace(model).code, make_fx(gradients)(torch.ones(2, 4)).code]

    plain = graphs()
    with ampscope.watch(model, optimizer, every=1, store=tmp_path / "runs.db") as run:
        assert graphs() == plain
        model(torch.ones(2, 4)).sum().backward()  # type: ignore[no-untyped-call]
        assert graphs() == plain
        optimizer.step()
    with Reader(run.store) as reader:
        assert [step.loss for step in reader.steps(run.id)] == [pytest.approx(_sum(model).item())]


def _sum(model: nn.Module) -> Tensor:
    """What the first step's loss was: the model as it was before it."""
    before = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for parameter, now in zip(before.parameters(), model.parameters(), strict=True):
        assert now.grad is not None
        parameter.data = now.detach() + 0.1 * now.grad
    out: Tensor = before(torch.ones(2, 4)).sum()
    return out


class Closed(Tensor):
    """Takes no attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Hidden(Tensor):
    """Shows none."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AttributeError("__dict__")


@pytest.mark.parametrize("kind", [Closed, Hidden])
def test_outputs_of_a_class_that_answers_for_attributes_end_no_watch(
    kind: type[Tensor], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ampscope.watch(model, optimizer, every=1, store=tmp_path / "runs.db") as run:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4).as_subclass(kind)).sum().backward()
            optimizer.step()
    assert "stopped" not in capfd.readouterr().err
    with Reader(run.store) as reader:
        assert [step.grad_norm for step in reader.steps(run.id)] == [pytest.approx(80**0.5)] * 3


def _switched_off() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sparse_products_below_autocast_are_those_without_a_watch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sparse, x = torch.randn(16, 16).relu().to_sparse(), torch.randn(16, 16)
    with torch.autocast("cpu", dtype):
        plain = torch.sparse.mm(sparse, x)
        with _recorded(nn.Identity(), None, None):
            watched = torch.sparse.mm(sparse, x)
    assert plain.dtype is watched.dtype is dtype
    assert torch.equal(plain, watched)


@pytest.mark.parametrize("region", [contextlib.nullcontext, _switched_off])
def test_sparse_products_without_autocast_stay_in_fp32(region: Callable[[], Any]) -> None:
    """And with the weights of now: no copy of an earlier step's."""
    sparse = torch.eye(16).to_sparse()
    weight = nn.Parameter(torch.full((16, 16), 1 + 2.0**-12))
    with _recorded(nn.Identity(), None, None):
        with torch.autocast("cpu", torch.bfloat16):
            torch.sparse.mm(sparse, weight)
        for value in (1 + 2.0**-12, 2 + 2.0**-12):
            with torch.no_grad():
                weight.fill_(value)
            with region():
                found = torch.sparse.mm(sparse, weight)
            assert found.dtype is torch.float32
            assert torch.equal(found, weight)


def test_sparse_products_of_late_evaluations_are_those_of_early_ones(tmp_path: Path) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(torch.eye(4).to_sparse(), x)

    model, x = Product(), torch.randn(4, 4)
    recorder = ScriptRecorder(str(tmp_path), Cadence(), lambda count: None)
    with recorder.watching(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert {model(x).dtype for _ in range(20)} == {torch.bfloat16}
