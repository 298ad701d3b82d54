"""Did a fix work? A run with it is judged like the original, by symptom, by rule and by its loss.

A cure has three parts: a symptom that was measured is gone, the cause is found no more, and the
loss follows that of the fp32 control. Where the script had no symptom, or too few steps are left to
compare the losses, the pattern may be removed and yet nothing is proved: that is None.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from itertools import pairwise

from ampscope.analysis.compiled_runs import (
    apart,
)
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.precision_use import MIN_COMPARED
from ampscope.analysis.repeatability import difference
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import (
    BEHIND_APART,
    BEHIND_SHARE,
    LEARNS_SHARE,
    TAIL_SCATTER,
    Symptom,
    symptoms,
)
from ampscope.control import BASELINE, Control
from ampscope.diagnosis.captured_step import cures_the_step, is_captured
from ampscope.diagnosis.findings import Diagnosis, Finding, diagnose
from ampscope.rules.verdict import Verdict

# With these a script leaves steps out, or ends, by itself: a fix has to bring the steps back.
GUARDED = frozenset({Symptom.ENDED, Symptom.DROPPED, Symptom.EXCEPTION})
AS_GOOD = 0.1  # of the first loss: no more above fp32's, where fp32 does not learn either
NUMBERS = frozenset({Symptom.LOSS, Symptom.WEIGHTS, Symptom.GRADIENTS, Symptom.DIVERGED})
OF_STEPS = frozenset({"lr", "fp32_state"})  # what they change, an optimizer's step alone reads


def is_cured(
    finding: Finding, evidence: Evidence, fixed: RunView, fixed_fp32: RunView | None
) -> bool | None:
    """True: a measured symptom is gone and the loss follows the control's. False: the symptom or
    the cause is still there, or the loss does not follow. None: the cause is found no more, and an
    effect cannot be measured."""
    if not fixed.steps or fixed.has_exception:
        return False
    if evidence.fp32 is not None and not _ends_alike(fixed, evidence):
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
    left = symptoms(fixed, evidence.fp32) & evidence.symptoms
    if left - _of_its_search(fixed):
        return False
    if not _is_removed(finding, evidence, fixed):
        return False
    if not evidence.symptoms and not rule.is_measured:
        return None
    if is_captured(evidence.baseline):
        return cures_the_step(fixed, evidence.fp32)
    return follows(fixed, evidence.fp32)


def trains(run: RunView) -> bool:
    """Its numbers stay finite, and its loss ends no higher than it began. Of a divergence that is
    none of AMP's, a fix is asked this in half precision and in fp32."""
    return not symptoms(run, None) & NUMBERS and _falls(run)


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


def follows(run: RunView, reference: RunView | None) -> bool | None:
    """Whether the losses of ``run`` after its search for a scale come down as the reference's do in
    as many steps. None when there are too few to compare, or when the reference does not train.

    Of ten losses from 2.0 down to 1.1 the first three have the mean 1.9 and the last two 1.15: the
    reference made a progress of 0.75. A run follows it when its own last two have come down by half
    of that (:data:`BEHIND_SHARE`), to 1.525 or less, or lie within the scatter of the reference's.
    One that skipped its first four steps is compared by its losses from the fifth on, with as many
    of the reference's first ones.
    """
    if reference is None:
        return None
    if len({a.optimizer for a in reference.steps}) != 1:
        return True  # the losses of several optimizers play against each other
    own = [a.loss for a in run.steps[run.leading_skips :] if a.loss is not None]
    other = [a.loss for a in reference.steps if a.loss is not None]
    count = min(len(own), len(other))
    if count < MIN_COMPARED:
        return None
    head, tail, scatter = _course(other[:count])
    reached = _course(own[:count])[1]
    if not math.isfinite(reached):
        return False
    if not math.isfinite(tail):
        return reached <= head
    if tail > other[0] + AS_GOOD * abs(other[0]):
        return None  # the control's loss rises: to follow it proves nothing
    progress = head - tail
    if progress <= LEARNS_SHARE * abs(head):  # nothing to learn from the control in these steps
        return reached - tail <= max(AS_GOOD * abs(head), TAIL_SCATTER * scatter)
    share = BEHIND_APART if difference(run, reference) else BEHIND_SHARE
    return head - reached >= share * progress or reached - tail <= TAIL_SCATTER * scatter


def _falls(run: RunView) -> bool:
    """The loss ends no higher than it began: what only bounds a divergence is no cure."""
    losses = [a.loss for a in run.steps if a.loss is not None]
    if not losses:
        return False
    tail = _course(losses)[1]
    return math.isfinite(tail) and tail <= losses[0] + LEARNS_SHARE * abs(losses[0])


def _course(losses: list[float]) -> tuple[float, float, float]:
    """Means of the first three losses and of the last fifth, and the latter's scatter."""
    last = losses[-max(1, len(losses) // 5) :]
    scatter = statistics.stdev(last) if len(last) > 1 and all(map(math.isfinite, last)) else 0.0
    return statistics.fmean(losses[:3]), statistics.fmean(last), scatter


def _of_its_search(fixed: RunView) -> frozenset[Symptom]:
    """Symptoms that a search for the scale at the start explains. The steps that it has cost are
    behind fp32's where every skip lowered the scale: :func:`follows` compares the loss without
    them."""
    if not _only_searches(fixed):
        return frozenset()
    search = fixed.steps[: fixed.leading_skips + 1]
    falls = len(search) > 1 and all(b.scale < a.scale for a, b in pairwise(search))
    return frozenset({Symptom.SKIPS, Symptom.BEHIND} if falls else {Symptom.SKIPS})


def _only_searches(run: RunView) -> bool:
    """Its skips are a search for the scale that has begun the run: finite losses, a scale of 1 or
    more. In a short run such a search may not have ended."""
    search = run.steps[: run.leading_skips]
    is_finite = all(a.loss is None or math.isfinite(a.loss) for a in search)
    return len(run.skips) == len(search) and is_finite and all(a.scale >= 1 for a in search)


def _is_removed(finding: Finding, evidence: Evidence, fixed: RunView) -> bool:
    """Whether the cause is found no more."""
    if finding.rule.is_removed is not None:
        return finding.rule.is_removed(evidence.baseline, fixed)
    again = diagnose(Evidence({BASELINE: fixed, "fp32": evidence.fp32 or fixed}, evidence.policy))
    return all(f.cause != finding.cause for f in again.findings)


def _ends_alike(fixed: RunView, evidence: Evidence) -> bool:
    """Whether ``fixed`` comes to the end that the fp32 control comes to: its exit status, and its
    number of steps where the baseline run made another. What a time limit cut short is compared
    by its status alone."""
    fp32, before = evidence.fp32, evidence.baseline
    assert fp32 is not None
    if fp32.has_exception or not fixed.ended_itself:
        return True  # no end to come to; or it went on to a limit of the run
    if fp32.ended_itself and fixed.outcome.exit_code != fp32.outcome.exit_code:
        return False
    if not fp32.ended_itself and fixed.outcome.exit_code:
        return False
    guards = bool(evidence.symptoms & GUARDED or before.guarded_losses)
    if not guards or "time" in (fp32.outcome.ended, fixed.outcome.ended):
        return True
    return fixed.outcome.steps >= fp32.outcome.steps
