"""A control of which losses and results are asked: its ops are seen where lines are compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ampscope.capture.script.op_watch import OpWatch
from ampscope.observations import BadOp, Call, Digests, OptimizerStep, Scan
from ampscope.records import HALF_FROM, LIGHT, RunSpec
from ampscope.runner.script import RunCallbacks, ScriptResult, run_script

TEXT = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(64, 4)
for step in range(30):
    loss = model(data[2 * step:2 * step + 2]).square().mean()
    optimizer.zero_grad()
    (loss * 1024).backward()
    for p in model.parameters():
        p.grad.div_(1024)
    if step == 12:
        torch.tensor(1e30) * torch.tensor(1e30)
    optimizer.step()
"""


def ran(folder: Path, control: str = "fp32", steps: int = 50, **settings: str) -> ScriptResult:
    path = folder / "train.py"
    path.write_text(TEXT)
    spec = RunSpec(
        str(path), kind="script", steps=steps, policy="native", control=control,
        settings=tuple(settings.items()),
    )  # fmt: skip
    return run_script(spec, "native", RunCallbacks())


def of(result: ScriptResult, kind: type) -> list[object]:
    return [o for o in result.observations if isinstance(o, kind)]


def test_losses_gradients_and_weights_are_those_of_a_run_that_is_watched(tmp_path: Path) -> None:
    """Also of a loss that is scaled by hand: no op is seen that would say so."""
    watched, light = ran(tmp_path), ran(tmp_path, **{LIGHT: "0"})
    steps = [
        [dataclasses.replace(s, ended_at=0.0) for s in of(r, OptimizerStep)]  # type: ignore[type-var]
        for r in (watched, light)
    ]
    assert len(steps[0]) == 30
    assert steps[0] == steps[1]
    ends = [[s for s in of(r, Scan) if s.moment == "end"] for r in (watched, light)]  # type: ignore[attr-defined]
    assert ends[0] == ends[1] != []
    values = [
        [c.value for c in of(r, Call) if c.name == "backward"]  # type: ignore[attr-defined]
        for r in (watched, light)
    ]
    assert values[0] == values[1]


def test_ops_are_seen_in_the_first_step_alone(tmp_path: Path) -> None:
    watched, light = ran(tmp_path), ran(tmp_path, **{LIGHT: "0"})
    assert of(watched, BadOp)
    assert not of(light, BadOp)
    assert 0 < light.outcome.traced_ops < watched.outcome.traced_ops / 10
    assert of(light, Digests) == of(watched, Digests) != []
    batches = [s for s in of(light, Scan) if s.moment == "batch"]  # type: ignore[attr-defined]
    assert not [s for s in batches if s.step > 1]  # type: ignore[attr-defined]  # all are finite
    assert light.outcome.step_cpu_s == 0  # it would be that of another way of running


def test_and_in_the_step_in_which_half_precision_begins(tmp_path: Path) -> None:
    light = ran(tmp_path, **{LIGHT: "0", HALF_FROM: "12"})
    (op,) = of(light, BadOp)
    assert isinstance(op, BadOp)
    assert op.step == 12
    once = ran(tmp_path, **{LIGHT: "0"}).outcome.traced_ops
    assert once < light.outcome.traced_ops < 3 * once


@pytest.mark.parametrize("limit", [7, 40])
def test_it_ends_with_the_baseline(tmp_path: Path, limit: int) -> None:
    light = ran(tmp_path, steps=10, **{LIGHT: str(limit)})
    assert light.outcome.steps == min(limit, 10)


def test_it_goes_on_as_far_as_the_baseline_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which was given time beyond its number of steps."""
    monkeypatch.setattr("ampscope.runner.script._Run._goes_on", lambda run, count: True)
    path = tmp_path / "train.py"
    path.write_text(TEXT)
    spec = RunSpec(
        str(path), kind="script", steps=5, policy="native", control="fp32", grace_s=1e-9,
        settings=((LIGHT, "20"),),
    )  # fmt: skip
    outcome = run_script(spec, "native", RunCallbacks()).outcome
    assert (outcome.ended, outcome.steps) == ("steps", 20)


def test_the_watch_leaves_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[bool] = []
    leave = OpWatch.leave

    def heard(watch: OpWatch) -> None:
        leave(watch)
        left.append(watch.is_asleep)

    monkeypatch.setattr(OpWatch, "leave", heard)
    ran(tmp_path, **{LIGHT: "0"})
    assert left == [True]
