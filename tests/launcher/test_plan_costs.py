"""Which controls of a diagnosis are run without their ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from ampscope.analysis.run_view import RunView
from ampscope.control import NUDGED
from ampscope.launcher.plan import DiagnosisPlan
from ampscope.launcher.script_runs import ScriptRun, ScriptRuns
from ampscope.observations import Call, Observation, OptimizerStep
from ampscope.records import LIGHT, Machine, RunInfo, RunSpec, State
from tests.helpers.evidence_making import (
    BACKWARD,
    FLAT,
    HEALTHY_FP32,
    STEP,
    but,
    fp32_run,
    log,
    run,
    scan,
    steps,
)
from tests.helpers.evidence_of_ops import ACTIVATION

SILENT = run(steps(FLAT))  # it learns less than fp32, and no number of it is not finite
AS_GOOD = run(steps())
NAN = run(but(steps(), [3], grad_nonfinite=10, skipped=True))


class Info:
    """Of a run: as much as the plan reads."""

    id = "run"
    machine: Machine | None = None
    state = State.FINISHED
    message = traceback = ""
    steps_done = 0

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec


class Runs:
    """Stands in for the processes: the baseline, the fp32 control, and others like the control."""

    in_place = False
    compared: Sequence[str] = ()

    def __init__(self, baseline: RunView, fp32: RunView, framework: str = "torch") -> None:
        self.seen = {"as_is": baseline, "fp32": fp32}
        self.spec = RunSpec("train.py", framework=framework)
        self.light: list[tuple[str, int | None]] = []

    def share_a_gpu(self) -> bool:
        return True

    def leave_overlay(self) -> bool:
        return False

    def start(
        self, control: str, parent: str = "", limit_s: float = 0.0, light: int | None = None
    ) -> str:
        self.light.append((control, light))
        return control

    def wait(self, control: str, show: object = None, say: object = None) -> ScriptRun:
        view = self.seen.get(control, self.seen["fp32"])
        observations: list[Observation] = [
            *view.calls, *view.steps, *view.bad_ops, *view.scans, view.outcome,
        ]  # fmt: skip
        given = next(light for name, light in reversed(self.light) if name == control)
        settings = () if given is None else ((LIGHT, str(given)),)
        info = Info(replace(self.spec, control=control, settings=settings))
        return ScriptRun(cast(RunInfo, info), tuple(observations), "")

    def run(self, control: str, parent: str = "", say: object = None) -> ScriptRun:
        return self.wait(self.start(control))


def lights(
    baseline: RunView, *controls: str, fp32: RunView = HEALTHY_FP32, framework: str = "torch"
) -> list[tuple[str, int | None]]:
    """(control, after how many steps it ends without its ops; None where these are seen)."""
    runs = Runs(baseline, fp32, framework)
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.run_baselines(None)
    for control in controls:
        plan.control(control)
    return runs.light[1:]


def test_what_is_compared_by_losses_and_results_needs_no_ops() -> None:
    asked = (NUDGED, "fp32_lines:train.py:3", "bf16")
    assert lights(SILENT, *asked) == [(name, 0) for name in ("fp32", *asked)]


def scaled_by_hand() -> RunView:
    factor = replace(BACKWARD, subject="", scaled=False, note="mul 1024")
    made = steps(scaler="", scale=1.0)
    return run(made, calls=log((factor, replace(STEP, name="step")), [a.loss for a in made]))


def guarded() -> RunView:
    read = Call(900, 4, "read", subject="loss", value=float("nan"), note="-1", line="train.py:9")
    return run(steps(), calls=[*AS_GOOD.calls, read])


@pytest.mark.parametrize(
    "baseline",
    [
        NAN,
        run(steps(), ACTIVATION),
        run(steps(), scan("end", "buffer", "bn.running_var", inf=1)),
        run(steps(), eval_nonfinite=True),
        run(steps(), errors_caught=3, error_text="boom"),
        run(steps(), ended="exception"),
        scaled_by_hand(),
        guarded(),
    ],
    ids=["gradients", "op", "buffers", "evaluation", "caught", "raised", "by hand", "guarded"],
)
def test_what_is_not_finite_or_scaled_by_hand_is_seen_in_ops_alone(baseline: RunView) -> None:
    assert lights(baseline, "bf16") == [("fp32", None), ("bf16", None)]


def test_a_cause_without_a_symptom_is_looked_for_in_the_ops() -> None:
    assert lights(AS_GOOD, NUDGED, "bf16") == [("fp32", 0), (NUDGED, 0), ("bf16", None)]


@pytest.mark.parametrize("ended", ["steps", "time"])
def test_a_control_makes_no_more_steps_than_a_baseline_that_was_stopped(ended: str) -> None:
    stopped = run(steps(FLAT), ended=ended)
    assert lights(stopped) == [("fp32", len(FLAT))]


def test_a_control_that_breaks_is_run_again_with_its_ops() -> None:
    broken: list[OptimizerStep] = but(steps(), [5], loss=float("nan"))
    assert lights(SILENT, fp32=fp32_run(broken)) == [("fp32", 0), ("fp32", None)]
    out_of_memory = fp32_run(ended="exception", error_type="OutOfMemoryError")
    assert lights(SILENT, fp32=out_of_memory) == [("fp32", 0)]


def test_other_frameworks_record_all() -> None:
    assert lights(SILENT, framework="keras") == [("fp32", None)]


def test_nor_is_compiled_code_run_without_its_ops() -> None:
    assert lights(SILENT, "compiled") == [("fp32", 0), ("compiled", None)]


def test_no_control_follows_a_baseline_that_a_user_has_stopped() -> None:
    class Stopped(Runs):
        def wait(self, control: str, show: object = None, say: object = None) -> ScriptRun:
            made = super().wait(control)
            info = cast(Any, made.info)
            info.state, info.message = State.CANCELLED, "Cancelled."
            return made

    runs = Stopped(SILENT, HEALTHY_FP32)
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.run_baselines(None)
    assert runs.light == [("as_is", None)]
    assert plan.problem() == "Cancelled."
