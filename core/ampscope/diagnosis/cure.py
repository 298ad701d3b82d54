"""Did a fix work? A run with it is judged like the original, by symptom, by rule and by its loss.

A cure has three parts: a symptom that was measured is gone, the cause is found no more, and the
loss follows that of the fp32 control. Where the script had no symptom, or too few steps are left to
compare the losses, the pattern may be removed and yet nothing is proved: that is None.
"""

from __future__ import annotations

import dataclasses
import math

from ampscope.analysis.compiled_runs import apart
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.healing import comes_to_its_end, follows, keeps_symptoms, trains
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.control import BASELINE, Control
from ampscope.diagnosis.captured_step import cures_the_step, is_captured
from ampscope.diagnosis.findings import Diagnosis, Finding, diagnose
from ampscope.rules.verdict import Verdict

OF_STEPS = frozenset({"lr", "fp32_state"})  # what they change, an optimizer's step alone reads


def is_cured(
    finding: Finding, evidence: Evidence, fixed: RunView, fixed_fp32: RunView | None
) -> bool | None:
    """True: a measured symptom is gone and the loss follows the control's. False: the symptom or
    the cause is still there, or the loss does not follow. None: the cause is found no more, and an
    effect cannot be measured."""
    if not comes_to_its_end(fixed, evidence):
        return False
    rule = finding.rule
    if rule.must_cure_fp32:
        if fixed_fp32 is None or not trains(fixed_fp32) or not trains(fixed):
            return False
        return follows(fixed, fixed_fp32)
    if rule.is_of_compiler:
        return apart({**evidence.runs, fixed.control: fixed}, fixed.control) is None
    if rule.leaves_symptoms:
        return _is_removed(finding, evidence, fixed)
    if keeps_symptoms(fixed, evidence) or not _is_removed(finding, evidence, fixed):
        return False
    if not evidence.symptoms and not rule.is_measured:
        return None
    if is_captured(evidence.baseline):
        return cures_the_step(fixed, evidence.fp32)
    return follows(fixed, evidence.fp32)


def comes_too_late(finding: Finding, control: str, evidence: Evidence) -> bool:
    """Whether a run under ``control`` cannot cure: it changes what an optimizer's step does, and
    the loss is not finite before the first step."""
    if not Control(control).names <= OF_STEPS:
        return False
    judged_by = [evidence.baseline]
    if finding.rule.must_cure_fp32 and evidence.fp32 is not None:
        judged_by.append(evidence.fp32)
    return any(_breaks_at_once(run) for run in judged_by)


def _breaks_at_once(run: RunView) -> bool:
    first = next(iter(run.steps), None)
    is_bad = first is not None and first.loss is not None and not math.isfinite(first.loss)
    return first is not None and first.step == 0 and is_bad and Symptom.LOSS in symptoms(run, None)


def by_trials(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """The diagnosis with the finding first whose fix was seen to cure, where the fixes of the one
    that the rules rank first were run and did not; of two neighbours also where only a fix that
    both share cured the first. A finding whose fix cannot be run keeps its place: nothing speaks
    against it."""
    cures = [_trial_outcomes(finding, evidence) for finding in diagnosis.findings]
    if not cures or not cures[0]:
        return diagnosis
    in_vain = all(cured is False for cured in cures[0].values())
    for place, (finding, outcomes) in enumerate(zip(diagnosis.findings, cures, strict=True)):
        alone = outcomes
        if place and not in_vain:
            if not is_ambiguous(diagnosis.findings[0], finding, evidence):
                continue
            own = set(finding.verdict.fix.controls)
            own -= set(diagnosis.findings[0].verdict.fix.controls)
            alone = {name: cured for name, cured in outcomes.items() if name in own}
        if (place or in_vain) and any(cured is True for cured in alone.values()):
            kept = list(diagnosis.findings)
            kept.insert(0, kept.pop(place))
            return dataclasses.replace(diagnosis, findings=tuple(kept))
    return diagnosis


def is_ambiguous(first: Finding, second: Finding, evidence: Evidence) -> bool:
    """Whether the trials so far leave open which of two neighbours is the root: what ``second``
    does not share of ``first``'s fixes was run, and none of it cured. A cure that both share, as
    bf16 is, tells nothing."""
    if not evidence.symptoms or not _are_neighbours(first, second, evidence):
        return False
    shared = {*second.verdict.fix.controls, *(["bf16"] if second.rule.searches_modules else [])}
    own = set(first.verdict.fix.controls) - shared
    alone = [cured for name, cured in _trial_outcomes(first, evidence).items() if name in own]
    return bool(alone) and all(cured is not True for cured in alone)


def _are_neighbours(first: Finding, second: Finding, evidence: Evidence) -> bool:
    """They name the same line or module, or the op of one takes what the other's made."""
    a, b = first.verdict, second.verdict
    if (a.line and a.line == b.line) or (a.module and a.module == b.module):
        return True
    chains = [(_consumers(one, evidence), other.op) for one, other in ((a, b), (b, a))]
    return any(op and op.rpartition(".")[2] in consumers for consumers, op in chains)


def _consumers(verdict: Verdict, evidence: Evidence) -> set[str]:
    """Ops that took the result of the bad op that ``verdict`` names."""
    known = [
        bad
        for bad in evidence.baseline.bad_ops
        if (bad.op, bad.line, bad.step) == (verdict.op, verdict.line, verdict.step)
    ]
    return {name for bad in known for name in bad.consumers}


def _trial_outcomes(finding: Finding, evidence: Evidence) -> dict[str, bool | None]:
    """By control: of the runs with the finding's own fixes, and of those with modules in fp32. One
    that did not fit into memory says nothing; one that comes too late need not be made."""
    runs = evidence.runs
    own = finding.verdict.fix.controls
    searched = finding.rule.searches_modules
    return {name: False for name in own if comes_too_late(finding, name, evidence)} | {
        name: is_cured(finding, evidence, view, runs.get(Control(name).in_fp32))
        for name, view in runs.items()
        if not view.outcome.is_out_of_memory
        and (name in own or (searched and Control(name).first.name == "fp32_modules"))
    }


def _is_removed(finding: Finding, evidence: Evidence, fixed: RunView) -> bool:
    """Whether the cause is found no more."""
    if finding.rule.is_removed is not None:
        return finding.rule.is_removed(evidence.baseline, fixed)
    again = diagnose(Evidence({BASELINE: fixed, "fp32": evidence.fp32 or fixed}, evidence.policy))
    return all(f.cause != finding.cause for f in again.findings)
