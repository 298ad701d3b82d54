"""Which fixes a diagnosis tries, and in which order: modules in fp32, bf16, the next finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from ampscope.analysis.run_view import RunView
from ampscope.control import Control
from ampscope.diagnosis.findings import Finding, diagnose
from ampscope.launcher.plan import DiagnosisPlan, wants_cuda
from ampscope.launcher.script_runs import ScriptRun, ScriptRuns
from ampscope.observations import BadOp, Observation, OpUse
from ampscope.records import RunInfo
from tests.helpers.evidence_making import FLAT, HEALTHY_FP32, OVERFLOWED, run, scan, steps
from tests.helpers.evidence_of_ops import ACTIVATION

MODULES = ("a", "b", "c", "d")
SCANS = [scan("start", "parameter", f"{name}.weight") for name in MODULES]


class Info:
    """Of a run: as much as the plan reads."""

    id = "run"
    machine = None


class Runs:
    """Stands in for the processes: only all modules in fp32, or bf16, cure."""

    def __init__(self, bad: list[BadOp], bf16_cures: bool, needed: tuple[str, ...]) -> None:
        self.broken: list[Observation] = _observations(run(steps(FLAT, **OVERFLOWED), *bad, *SCANS))
        self.healthy: list[Observation] = _observations(run(steps(), *SCANS))
        self.bf16_cures, self.needed = bf16_cures, needed
        self.made: list[str] = []

    def can_apply(self, control: str) -> bool:
        return True

    def first_to_share(self) -> str:
        return ""  # every run has a copy of all that it writes

    def start(self, control: str, parent: str = "") -> str:
        return control

    def wait(self, control: str, show: object = None) -> ScriptRun:
        return self.run(control)

    def run(self, control: str, parent: str = "") -> ScriptRun:
        self.made.append(control)
        name, _, value = control.partition(":")
        cures = name == "bf16" and self.bf16_cures
        cures = cures or (name == "fp32_modules" and set(self.needed) <= set(value.split(",")))
        seen = self.healthy if cures else self.broken
        if name == "fp32":
            seen = _observations(HEALTHY_FP32)
        return ScriptRun(cast(RunInfo, Info()), tuple(seen), "")


def _observations(view: RunView) -> list[Observation]:
    return [*view.calls, *view.attempts, *view.bad_ops, *view.scans, view.outcome]


def _bad(*modules: str) -> list[BadOp]:
    return [
        replace(ACTIVATION, id=n, module=name, line=f"train.py:{n + 1}")
        for n, name in enumerate(modules)
    ]


def _tried(bad: list[BadOp], *, bf16: bool, needed: tuple[str, ...]) -> tuple[DiagnosisPlan, Runs]:
    runs = Runs(bad, bf16, needed)
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.first_two(None)
    plan.try_fixes(diagnose(plan.evidence).findings[0])
    return plan, runs


@pytest.mark.parametrize("overflowing", [MODULES, ("a",)])
def test_every_module_in_fp32_gives_way_to_bf16(overflowing: tuple[str, ...]) -> None:
    plan, runs = _tried(_bad(*overflowing), bf16=True, needed=MODULES)
    cured = [trial for trial in plan.trials if trial.cured]
    assert [(t.control, t.kind) for t in cured] == [("bf16", "use_bf16")]
    assert runs.made.count("bf16") == 1


def test_where_most_modules_overflow_no_set_is_searched() -> None:
    _, runs = _tried(_bad(*MODULES), bf16=True, needed=MODULES)
    assert not [made for made in runs.made if made.count(",")]


def test_without_a_healthy_bf16_every_module_is_the_answer() -> None:
    plan, _ = _tried(_bad(*MODULES), bf16=False, needed=MODULES)
    cured = [trial.control for trial in plan.trials if trial.cured]
    assert cured == ["fp32_modules:a,b,c,d"]


def test_a_small_set_is_still_preferred() -> None:
    plan, _ = _tried(_bad("a"), bf16=True, needed=("b", "d"))
    cured = [trial.control for trial in plan.trials if trial.cured]
    assert cured == ["fp32_modules:b,d"]


def test_the_next_findings_fix_is_run_where_the_first_ones_do_not_cure() -> None:
    runs = Runs(_bad("a"), False, ("b",))
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.first_two(None)
    diagnosis = diagnose(plan.evidence)
    root = diagnosis.findings[0]
    in_vain = replace(root.verdict.fix, controls=("scale:8",))
    first = Finding("scaled_gradient_penalty", replace(root.verdict, fix=in_vain))
    works = replace(root.verdict.fix, controls=("fp32_modules:b",))
    second = Finding(root.cause, replace(root.verdict, fix=works))
    both = replace(diagnosis, findings=(first, second))
    plan.try_fixes(first)
    assert plan.settled(both).findings == (second, first)
    assert [(t.control, t.cured) for t in plan.trials] == [
        ("scale:8", False),
        ("fp32_modules:b", True),
    ]


@pytest.mark.parametrize(
    ("asked", "wants"),
    [
        ("cuda_missing", True),  # a GradScaler that stayed off, beside autocast in bf16 on the CPU
        ("cuda_asked", False),  # it took what is there
        ("binary_cross_entropy under autocast", False),
    ],
)
def test_a_device_is_rehearsed_for_what_torch_switched_off(asked: str, wants: bool) -> None:
    trained = run(steps(), OpUse(asked, "GradScaler", "", "train.py:8", 0))
    assert wants_cuda(trained, "") is wants


def test_lines_that_overflow_each_by_itself_are_tried_together() -> None:
    """Each run with lines in fp32 has the next line as its root."""
    lines = ("train.py:1", "train.py:2", "train.py:3")
    bad = [replace(ACTIVATION, id=n, module="", line=line) for n, line in enumerate(lines)]

    class Lines(Runs):
        def run(self, control: str, parent: str = "") -> ScriptRun:
            wide = Control(control).values("fp32_lines")
            if not wide:
                return super().run(control, parent)
            self.made.append(control)
            left = [op for op in bad if op.line not in wide]
            seen = (
                self.healthy if not left else _observations(run(steps(FLAT, **OVERFLOWED), *left))
            )
            return ScriptRun(cast(RunInfo, Info()), tuple(seen), "")

    runs = Lines(bad, bf16_cures=False, needed=MODULES)
    plan = DiagnosisPlan(cast(ScriptRuns, cast(Any, runs)), lambda text: None)
    plan.first_two(None)
    plan.try_fixes(diagnose(plan.evidence).findings[0])
    assert [c for c in runs.made if c.startswith("fp32_lines")] == [
        f"fp32_lines:{','.join(lines[:n])}" for n in (1, 2, 3)
    ]
    assert [t.cured for t in plan.trials] == [False, False, True]
