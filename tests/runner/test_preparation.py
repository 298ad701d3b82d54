"""What precedes a training in half precision: it uses up no record, and runs without a watch."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ampscope.observations import BadOp, LineUse, OptimizerStep, ParameterGradient
from ampscope.patches import within
from ampscope.policy.device_profiles import PROFILES, USUAL
from ampscope.policy.tensor_core import TensorCoreMode
from ampscope.records import HALF_FROM, RUN_OUT_S, Cadence, RunSpec
from ampscope.runner import script, script_recorder
from ampscope.runner.probe import arithmetic
from ampscope.runner.script import RunCallbacks, ScriptResult, run_script
from ampscope.runner.script_recorder import ScriptRecorder
from ampscope.runner.script_text import names_half

SEEN = 50  # ops of a preparation that are looked at


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_recorder, "PREPARES", SEEN)
    monkeypatch.setattr(script_recorder, "OP_BUDGET", 2_000)


def recorder() -> ScriptRecorder:
    return ScriptRecorder(str(Path(__file__).parent), Cadence(0, 0, 0), lambda count: None)


def prepared(ops: int = 3_000) -> Tensor:
    x = torch.zeros(16)
    for _ in range(ops // 2):
        x = x * 0.5
        x = x + 1.0
    return x


class Attention(nn.Module):
    """Its scores get a mask that fp16 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.project(x) @ x.T
        return (scores if mask is None else scores + mask.to(scores.dtype)).softmax(-1)


def mask() -> Tensor:
    made = torch.zeros(4, 4)
    made[0] = -1e9
    return made


def train(model: nn.Module, x: Tensor, steps: int, *, half: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16) if half else torch.enable_grad():
            loss = model(x, mask() if half else None).float().square().mean()
        loss.backward()
        optimizer.step()


def test_a_long_preparation_is_left_alone_and_the_overflow_behind_it_found() -> None:
    torch.manual_seed(0)
    plain = prepared()
    found, model = recorder(), Attention()
    with found.watching():
        x = prepared()
        assert found.watch.is_asleep
        seen = found.watch.seen_ops
        train(model, x.repeat(4, 1), 3, half=True)
        assert not found.watch.is_asleep
    assert torch.equal(plain, x)
    assert SEEN <= seen <= SEEN + 2  # the line of the last one has ended
    outcome = found.outcome("returned")
    assert "fp16" in outcome.flop_dtypes
    bad = [o for o in found.observations(outcome) if isinstance(o, BadOp)]
    assert [(b.op, b.module_type, b.step, b.reached_loss) for b in bad[:1]] == [
        ("aten._to_copy", "Attention", 0, True)
    ]
    assert not _get_current_dispatch_mode_stack()
    assert sys.gettrace() is None


def of_fp32_model() -> object:
    return nn.Linear(16, 1)(torch.ones(1, 16))


def by_hand() -> object:
    return torch.ones(2, requires_grad=True).sum().backward()


def in_region(dtype: torch.dtype | None) -> None:
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        pass


@pytest.mark.parametrize(
    ("begins", "wakes"),
    [
        (of_fp32_model, True),
        (by_hand, True),
        (lambda: torch.optim.SGD([torch.ones(2, requires_grad=True)]).zero_grad(), True),
        (lambda: nn.Linear(2, 2).half(), True),
        (lambda: in_region(torch.bfloat16), True),
        (lambda: in_region(None), True),  # as in an fp32 control
        (lambda: torch.ones(2).to(torch.float64), False),
        (lambda: nn.Linear(16, 1).requires_grad_(False)(torch.ones(1, 16)), False),
        (lambda: torch.no_grad()(of_fp32_model)(), False),
    ],
)
def test_what_wakes(begins: Callable[[], object], wakes: bool) -> None:
    found = recorder()
    with found.watching():
        prepared(200)
        assert found.watch.is_asleep
        begins()
        assert found.watch.is_asleep is not wakes


def test_a_stand_in_device_is_asked_through_the_wrappers_of_casts() -> None:
    """It looks at who calls: frames of this name pass on what a script asks."""
    names = ("half", "bfloat16", "to", "type")
    before = [getattr(Tensor, name) for name in names]
    found = recorder()
    with found.watching():
        prepared(200)
        assert found.watch.is_asleep
        now = [getattr(Tensor, name) for name in names]
        assert {method.__code__.co_name for method in now} == {"__torch_function__"}
        assert [within(method) for method in now] == before
    assert [getattr(Tensor, name) for name in names] == before


def test_it_sleeps_while_a_library_prepares(tmp_path: Path) -> None:
    library = {}
    text = "def make(x):\n for _ in range(200):\n  x = x * 0.5\n return x\n"
    exec(compile(text, str(tmp_path / "library.py"), "exec"), library)
    found = recorder()
    with found.watching():
        library["make"](torch.zeros(16))
        assert found.watch.is_asleep
        assert found.watch.seen_ops <= SEEN + 2


@pytest.mark.parametrize("empties_first", [True, False])
def test_a_cast_by_hand_is_seen_without_a_model(empties_first: bool) -> None:
    found, weight = recorder(), torch.full((4, 4), 300.0, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-9)
    with found.watching():
        prepared(200)
        assert found.watch.is_asleep
        for _ in range(3):
            if empties_first:
                optimizer.zero_grad()
            half = weight.half()
            loss = (half * half).float().mean()
            loss.backward()
            optimizer.step()
    bad = [o for o in found.observations(found.outcome("returned")) if isinstance(o, BadOp)]
    ops = [(b.op, b.step, b.reached_loss) for b in bad if b.phase == "forward"]
    assert ops == [("aten.mul", 0 if empties_first else 1, True)]
    assert bool(found.watch.sleep_note) is not empties_first
    assert found.window.first == 0


class Own(TorchDispatchMode):
    """A mode of the script's own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_modes_of_the_script_keep_their_places() -> None:
    found, own = recorder(), Own()
    with found.watching():
        first = _get_current_dispatch_mode_stack()
        prepared(200)
        with own:
            by_hand()
            assert not found.watch.is_asleep
            assert [*first, own] == _get_current_dispatch_mode_stack()
        assert _get_current_dispatch_mode_stack() == first


def test_it_leaves_from_below_a_mode_of_the_script() -> None:
    found, own = recorder(), Own()
    with found.watching():
        first = _get_current_dispatch_mode_stack()
        with own:
            prepared(200)
            assert found.watch.is_asleep
            assert [*first[:-1], own] == _get_current_dispatch_mode_stack()
        by_hand()
        assert _get_current_dispatch_mode_stack() == first


def test_a_script_that_is_traced_keeps_its_tracer() -> None:
    found = recorder()

    def tracer(*_: object) -> None:
        pass

    before = sys.gettrace()
    with found.watching():
        sys.settrace(tracer)
        prepared(200)
        kept = sys.gettrace()
        sys.settrace(before)
        assert kept is tracer
        assert not found.watch.is_asleep


PRETRAINED = """
import torch
from torch import nn

model = nn.Linear(8, 1)
x = torch.randn(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def train(steps, half):
    for _ in range(steps):
        optimizer.zero_grad()
        if half:
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
        else:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()


train({before}, False)
train({after}, {half})
"""


def ran(
    tmp_path: Path, before: int, after: int, half: str = "True", text: str = PRETRAINED,
    control: str = "as_is", grace_s: float = 1e-9, settings: tuple[tuple[str, str], ...] = (),
    following: RunCallbacks = RunCallbacks(),  # noqa: B008  # frozen
) -> ScriptResult:  # fmt: skip
    path = tmp_path / "train.py"
    path.write_text(text.format(before=before, after=after, half=half))
    # In a process of its own the script's are the only modules that are the user's.
    own = partial(names_half, lambda code: code.co_filename == str(path))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(script, "names_half", lambda is_user: own())
        return run_script(spec_of(path, control, grace_s, settings), "native", following)


def spec_of(
    path: Path, control: str = "as_is", grace_s: float = 1e-9,
    settings: tuple[tuple[str, str], ...] = (),
) -> RunSpec:  # fmt: skip
    return RunSpec(
        str(path), kind="script", steps=10, policy="native", control=control, grace_s=grace_s,
        cadence=Cadence(1, 1, 0), settings=(*settings, (RUN_OUT_S, "0")),
    )  # fmt: skip


def steps_of(result: ScriptResult) -> list[int]:
    return [o.step for o in result.observations if isinstance(o, OptimizerStep)]


@pytest.mark.parametrize("control", ["as_is", "fp32"])
def test_the_window_begins_with_half_precision(tmp_path: Path, control: str) -> None:
    result = ran(tmp_path, 20, 40, control=control)
    assert (result.outcome.ended, result.outcome.half_from) == ("steps", 20)
    assert steps_of(result) == [*range(30)]  # no step is lost, and ten are in half precision
    assert any("from step 20 on" in note for note in result.outcome.notes)
    assert {f.step for f in result.measured.frames} == {*range(30)}
    detailed = {o.step for o in result.observations if isinstance(o, ParameterGradient)}
    assert detailed == {*range(4), *range(20, 24)}
    if control == "as_is":
        uses = [o for o in result.observations if isinstance(o, LineUse)]
        assert any("fp16" in (*use.takes, use.makes) for use in uses)


REHEARSED = """
import torch
from torch import nn

made = torch.zeros(16)
for _ in range(200):
    made = made * 0.5
model = nn.Linear(16, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    batch = made.repeat(4, 1).to("cuda").half()
    with torch.autocast("cuda", torch.float16):
        loss = model(batch.to(model.weight.device)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert loss.device.type == "cuda"
"""


def test_a_rehearsed_device_is_found_after_the_sleep(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(REHEARSED)
    result = run_script(replace(spec_of(path), policy="rehearsal"), "rehearsal", RunCallbacks())
    assert (result.outcome.ended, result.outcome.error_text) == ("returned", "")
    assert steps_of(result) == [0, 1, 2]


def test_the_control_begins_where_the_first_run_did(tmp_path: Path) -> None:
    """Its own casts are gone, so it cannot know by itself."""
    result = ran(tmp_path, 30, 40, half="False", settings=((HALF_FROM, "25"),))
    assert steps_of(result) == [*range(35)]


@pytest.mark.parametrize(
    ("half", "text", "grace_s", "steps"),
    [
        ("True", PRETRAINED, 0.0, 10),  # --steps 10
        ("False", PRETRAINED, 1e-9, 10 * script.MOST_WAITED),  # it may come: it is waited for
        ("False", PRETRAINED.replace("torch.autocast", "torch.other"), 1e-9, 10),  # it never comes
    ],
)
def test_without_half_precision_the_window_begins_at_once(
    tmp_path: Path, half: str, text: str, grace_s: float, steps: int
) -> None:
    text = text.replace("torch.float16", "None") if "other" in text else text
    result = ran(tmp_path, 30, 160, half=half, text=text, grace_s=grace_s)
    assert result.outcome.ended == "steps"
    assert steps_of(result) == [*range(steps)]


ADAPTED = """
import torch
from torch import nn


def train(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


class Cast(nn.Linear):
    def forward(self, x):
        return x.to(torch.bfloat16) @ self.weight.t().to(torch.bfloat16)


x = torch.randn(16, 8)
model = nn.Linear(8, 1)
train(model, torch.optim.Adam(model.parameters(), lr=1e-3), x, {before})
if {half}:
    x, model = x.to(torch.bfloat16), model.to("cpu", torch.bfloat16)
else:
    model = Cast(8, 1, bias=False)
train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), x, {after})
"""


@pytest.mark.parametrize(("half", "late"), [("True", 0), ("False", script.GLANCE)])
def test_a_half_phase_is_found_behind_a_long_one_in_fp32(
    tmp_path: Path, half: str, late: int
) -> None:
    """By the call that casts the model at once; by ops alone at the next step that is looked at."""
    result = ran(tmp_path, 45, 60, half=half, text=ADAPTED)
    assert 45 <= result.outcome.half_from <= 45 + late
    assert steps_of(result) == [*range(result.outcome.half_from + 10)]
    uses = [o for o in result.observations if isinstance(o, LineUse)]
    assert any("bf16" in (*use.takes, use.makes) for use in uses)


def test_few_ops_are_seen_while_half_precision_is_waited_for(tmp_path: Path) -> None:
    traced: list[int] = []
    following = RunCallbacks(on_optimizer_step=lambda r: traced.append(r.watch.seen_ops))
    ran(tmp_path, 30, 160, half="False", following=following)
    each = np.diff(traced)
    assert (each[2:9] > 0).all()
    assert 0 < (each[20:] > 0).mean() < 2 / script.GLANCE


def test_half_precision_is_not_waited_for_beyond_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "MOST_WAITED_S", 0.0)
    assert steps_of(ran(tmp_path, 30, 60, half="False")) == [*range(10)]


def test_a_run_that_waits_for_half_precision_can_be_cancelled(tmp_path: Path) -> None:
    asked = iter(range(1, 100))
    following = RunCallbacks(is_cancelled=lambda: next(asked) == 15)
    result = ran(tmp_path, 20, 40, following=following)
    assert result.outcome.ended == "cancelled"
    assert steps_of(result) == [*range(15)]


# Under a rehearsal CUDA's arithmetic sleeps as well, until the first half tensor or autocast.


def pooled(x: Tensor) -> Tensor:
    """An op in half that CUDA has and a CPU has not: it shows whether CUDA's arithmetic is on."""
    return nn.functional.avg_pool3d(x, 2)


CUBE = (1, 1, 4, 4, 4)


def from_a_file(folder: Path) -> Tensor:
    torch.save(torch.ones(CUBE, dtype=torch.float16), folder / "half.pt")
    loaded: Tensor = torch.load(folder / "half.pt")
    return loaded


def of_autocast(folder: Path) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        made: Tensor = nn.Linear(4, 4).cuda()(torch.ones(CUBE).cuda())
    return made


def hooked(_: Path) -> Tensor:
    """Half begins within a backward pass, behind each node of which torch puts its modes back."""
    w = torch.ones(CUBE, requires_grad=True)
    w.register_hook(lambda gradient: gradient.half().float())
    w.sum().backward()
    return w.detach()


FIRST_HALF: dict[str, Callable[[Path], Tensor]] = {
    "half": lambda _: torch.ones(CUBE).half(),
    "to": lambda _: torch.ones(CUBE).cuda().to(torch.float16),
    "dtype": lambda _: torch.ones(CUBE, dtype=torch.float16, device="cuda"),
    "numpy": lambda _: torch.from_numpy(np.ones(CUBE, np.float16)),
    "file": from_a_file,
    "parameter": lambda _: nn.Parameter(torch.ones(CUBE).half()),
    "autocast": of_autocast,
    "backward": hooked,
    "data": lambda _: torch.ones(CUBE).to(torch.float16).data,
}


@pytest.mark.parametrize("first", FIRST_HALF.values(), ids=FIRST_HALF)
def test_the_first_half_tensor_meets_the_arithmetic_of_cuda(
    first: Callable[[Path], Tensor], tmp_path: Path, stand_in: Callable[..., Any]
) -> None:
    profile, found = PROFILES[USUAL], recorder()
    stack = _get_current_dispatch_mode_stack
    with stand_in(profile) as device, arithmetic("rehearsal", device), found.watching():
        x = prepared(300)
        assert found.watch.is_asleep
        assert not any(isinstance(mode, TensorCoreMode) for mode in stack())
        made = pooled(first(tmp_path)).half()
        assert isinstance(stack()[0], TensorCoreMode)
        prepared(100)
        train(Attention(), x.repeat(4, 1), 1, half=False)  # the watch is awake from here on
        kinds = [type(mode) for mode in stack()]
        assert (len(kinds), kinds[0]) == (2, TensorCoreMode)
        made = pooled(made.repeat(1, 1, 2, 2, 2))
    assert not stack()
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        pooled(torch.ones(CUBE).half())


def test_a_preparation_gives_the_same_numbers_whether_or_not_cuda_is_rehearsed(
    stand_in: Callable[..., Any],
) -> None:
    plain = prepared()
    with stand_in(PROFILES[USUAL]) as device, arithmetic("rehearsal", device):
        assert torch.equal(prepared(), plain)
        assert torch.equal(prepared().cuda().cpu(), plain)


@pytest.mark.parametrize(
    ("text", "may_come"),
    [
        ("args = TrainingArguments('out', bf16=True)", True),
        ("def main():\n    return Accelerator(mixed_precision='fp16')", True),
        ("trainer = Trainer(precision='16-mixed')", True),
        ("print('training in fp32', end='')", False),
    ],
)
def test_a_trainer_is_asked_for_half_by_a_word(
    text: str, may_come: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "asks.py"
    path.write_text(text)
    module = types.ModuleType("asks")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "asks", module)
    assert names_half(lambda code: code.co_filename == str(path)) is may_come
