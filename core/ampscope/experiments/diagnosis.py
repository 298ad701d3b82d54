"""Plan the runs of a diagnosis, and stop when the evidence suffices.

as_is and fp32 together  ->  rules  ->  compiled, where the script compiles and is accused
                         ->  bf16, a frozen scale where they ask for one
                         ->  the finding's fixes, best first, until one cures
                         ->  the smallest set of modules in fp32, where one module is not enough
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ampscope.diagnose import Diagnosis
from ampscope.experiments.plan import Plan, Say
from ampscope.experiments.script_runs import ScriptRuns
from ampscope.records import RunSpec
from ampscope.verdicts.compiled import COMPILED, judged, wants_compiled
from ampscope.verdicts.report import Report, report_of


def run_diagnosis(
    spec: RunSpec, store: Path, say: Say = lambda text: None, show: Say | None = None,
    verify: bool = True,
) -> Report:  # fmt: skip
    """Diagnose the script of ``spec``; ``say`` gets progress, ``show`` the script's own output."""
    started = time.monotonic()
    with ScriptRuns(replace(spec, control="as_is"), store, private=True) as runs:
        plan = Plan(runs, say)
        plan.first_two(show)
        diagnosis = judged(plan.evidence)
        if plan.problem() and not diagnosis.findings:
            return _report(plan, diagnosis, started)
        if plan.wants_frozen_scale():
            plan.control("scale:1")
            diagnosis = judged(plan.evidence)
        if wants_compiled(diagnosis, plan.evidence):
            plan.control(COMPILED)
            diagnosis = judged(plan.evidence)
        if diagnosis.findings or diagnosis.symptoms:
            plan.control("bf16")
            diagnosis = judged(plan.evidence)
        if verify and diagnosis.findings:
            plan.try_fixes(diagnosis.findings[0])
        return _report(plan, diagnosis, started)


def _report(plan: Plan, diagnosis: Diagnosis, started: float) -> Report:
    infos = {name: run.info for name, run in plan.done.items()}
    elapsed_s, output = time.monotonic() - started, plan.done["as_is"].output
    return report_of(diagnosis, plan.views, infos, tuple(plan.trials), elapsed_s, output)
