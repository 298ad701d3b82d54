"""Plan the runs of a diagnosis, and stop when the evidence suffices.

as_is and fp32 together  ->  rules  ->  bf16, a frozen scale where they ask for one
                         ->  the finding's fixes, best first, until one cures
                         ->  the smallest set of modules in fp32, where one module is not enough
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import symptoms
from ampscope.diagnose import Diagnosis, Finding, diagnose
from ampscope.experiments.cure import Trial, is_cured
from ampscope.experiments.fp32_set import smallest_fp32_set
from ampscope.experiments.script_runs import ScriptRun, ScriptRuns
from ampscope.records import RunInfo, RunSpec, State
from ampscope.rules.verdict import Fix

MAX_FIX_RUNS = 4
MAX_SEARCH_RUNS = 14
SEARCHED = ("activation_overflow", "elementwise_overflow", "reduction_overflow",
            "attention_logit_overflow", "log_zero_saturation", "norm_eps_underflow")  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a surface shows of one diagnosis."""

    script: str
    diagnosis: Diagnosis
    runs: dict[str, RunInfo]
    trials: tuple[Trial, ...]  # fixes that were run, in order
    elapsed_s: float
    could_not_run: str = ""  # the sentence for exit status 2
    notes: tuple[str, ...] = ()
    output: str = ""
    control_symptoms: dict[str, tuple[str, ...]] = field(default_factory=dict)


def run_diagnosis(
    spec: RunSpec, store: Path, say: Say = lambda text: None, show: Say | None = None,
    verify: bool = True,
) -> Report:  # fmt: skip
    """Diagnose the script of ``spec``; ``say`` gets progress, ``show`` the script's own output."""
    started = time.monotonic()
    with ScriptRuns(replace(spec, control="as_is"), store) as runs:
        plan = _Plan(runs, say)
        plan.first_two(show)
        problem = plan.problem()
        diagnosis = diagnose(plan.evidence)
        if problem and not diagnosis.findings:
            return plan.report(spec, diagnosis, started, problem)
        if plan.wants_frozen_scale(diagnosis):
            plan.control("scale:1")
            diagnosis = diagnose(plan.evidence)
        if diagnosis.findings or diagnosis.symptoms:
            plan.control("bf16")
            diagnosis = diagnose(plan.evidence)
        if verify and diagnosis.findings:
            plan.try_fixes(diagnosis.findings[0])
        return plan.report(spec, diagnosis, started)


class _Plan:
    """The runs made so far and what they say."""

    def __init__(self, runs: ScriptRuns, say: Say) -> None:
        self.runs = runs
        self.say = say
        self.done: dict[str, ScriptRun] = {}
        self.views: dict[str, RunView] = {}
        self.trials: list[Trial] = []

    @property
    def evidence(self) -> Evidence:
        machine = self.done["as_is"].info.machine
        return Evidence(self.views, machine.policy if machine else "native")

    def first_two(self, show: Say | None) -> None:
        self.say("as it is, and in fp32")
        first = self.runs.start("as_is")
        second = self.runs.start("fp32", parent=first)
        self._keep("as_is", self.runs.wait(first, show))
        self._keep("fp32", self.runs.wait(second))

    def control(self, control: str) -> RunView:
        """Run a control once."""
        if control not in self.views:
            self.say(control)
            parent = self.done["as_is"].info.id
            self._keep(control, self.runs.run(control, parent))
        return self.views[control]

    def problem(self) -> str:
        """Why there is nothing to judge; "" when there is."""
        info, outcome = self.done["as_is"].info, self.views["as_is"].outcome
        if info.state in (State.FAILED, State.LOST, State.CANCELLED):
            return info.message or f"The script's process ended without a word ({info.state})."
        if outcome.attempts:
            return ""
        if outcome.ended == "exception":
            where = f" at {outcome.error_line}" if outcome.error_line else ""
            text = outcome.error_text.strip().splitlines()
            return (
                f"The script raised {outcome.error_type}{where} before its first optimizer step: "
                f"{text[0][:200] if text else ''}"
            )
        if outcome.ended == "exit":
            return (
                f"The script called sys.exit({outcome.exit_code}) before its first optimizer step."
            )
        if outcome.ended == "time":
            return "The script made no optimizer step within the time limit."
        if outcome.backwards:
            return "The script called backward but never an optimizer's step."
        return "The script ended without calling backward: there is no training to diagnose."

    def wants_frozen_scale(self, diagnosis: Diagnosis) -> bool:
        """Every step was skipped at whatever scale, with a finite loss: is 1 borne?"""
        run = self.views["as_is"]
        none_taken = len(run.skips) == len(run.attempts)
        finite = not run.bad_loss_attempts
        return run.has_scaler and bool(run.skips) and none_taken and finite

    def try_fixes(self, finding: Finding) -> None:
        """Run the finding's interventions until one cures; then search the module tree if asked."""
        for control in finding.verdict.fix.controls[:MAX_FIX_RUNS]:
            if self._try(finding, control, finding.verdict.fix):
                return
        if finding.cause in SEARCHED:
            self._search(finding)
        if not any(t.cured for t in self.trials) and finding.cause in SEARCHED:
            self._try(finding, "bf16", Fix("use_bf16", "Use bf16: it has the range of fp32."))

    def _try(self, finding: Finding, control: str, fix: Fix) -> bool:
        extra = f"fp32;{control}" if fix.kind == "lower_lr" else ""
        view = self.control(control)
        cured = is_cured(finding, self.evidence, view, self.control(extra) if extra else None)
        self.trials.append(Trial(control, kind_of(control, fix), cured, self._price(control)))
        return cured

    def _search(self, finding: Finding) -> None:
        def cures(paths: tuple[str, ...]) -> bool:
            view = self.control("fp32_modules:" + ",".join(paths))
            return is_cured(finding, self.evidence, view, None)

        names = _modules_with_ops(self.views["as_is"])
        found = smallest_fp32_set(names, cures, MAX_SEARCH_RUNS)
        if found:
            control = "fp32_modules:" + ",".join(found)
            self.trials.append(Trial(control, "fp32_module", True, self._price(control)))

    def _price(self, control: str) -> float | None:
        return price(self.views[control], self.views["as_is"])

    def _keep(self, control: str, run: ScriptRun) -> None:
        self.done[control] = run
        self.views[control] = RunView(control, run.info.id, run.observations)

    def report(
        self, spec: RunSpec, diagnosis: Diagnosis, started: float, problem: str = ""
    ) -> Report:
        return Report(
            script=spec.workload,
            diagnosis=diagnosis,
            runs={name: run.info for name, run in self.done.items()},
            trials=tuple(self.trials),
            elapsed_s=time.monotonic() - started,
            could_not_run=problem,
            notes=_notes(self.views["as_is"]),
            output=self.done["as_is"].output,
            control_symptoms={
                name: tuple(sorted(symptoms(self.views[name], None)))
                for name in ("fp32", "bf16")
                if name in self.views
            },
        )


def price(fixed: RunView, before: RunView) -> float | None:
    """Time an attempt of the fixed run over the time as it is; both were watched alike."""
    times = [
        v.outcome.elapsed_s / v.outcome.attempts if v.outcome.attempts else 0.0
        for v in (fixed, before)
    ]
    return times[0] / times[1] if times[1] else None


def kind_of(control: str, fix: Fix) -> str:
    """Fix kind of what was really run, which may be another than the rule's first choice."""
    word = control.partition(":")[0]
    kinds = {
        "bf16": "use_bf16", "fp32_modules": "fp32_module", "eps": "raise_eps",
        "fp32_state": "fp32_optimizer_state", "fp32_params": "fp32_params",
        "add_scaler": "add_scaler", "init_scale": "change_scale", "lr": "lower_lr",
        "unscale_first": "move_unscale", "separate_scalers": "separate_scalers",
        "fp32_lines": "rewrite_op",
    }  # fmt: skip
    return kinds.get(word, fix.kind)


def _modules_with_ops(view: RunView) -> list[str]:
    """Modules that own parameters, as candidates for fp32."""
    names = [s.name.rpartition(".")[0] for s in view.scans if s.moment == "start"]
    return [name for name in dict.fromkeys(names) if name]


def _notes(view: RunView) -> tuple[str, ...]:
    notes = []
    if view.outcome.ended == "steps":
        notes.append(f"Stopped after {view.outcome.attempts} optimizer steps.")
    if view.outcome.ended == "time":
        notes.append(f"Stopped at the time limit after {view.outcome.attempts} optimizer steps.")
    return tuple(notes)
