"""Did a fix work? A run with it is judged like the original, by symptom, by rule and by its loss.

A cure has three parts: a symptom that was measured is gone, the cause is found no more, and the
loss follows that of the fp32 control. Where the script had no symptom, or too few steps are left to
compare the losses, the pattern may be removed and yet nothing is proved: that is None.

A script that compiles is judged here too: compiled code may cure what eager code does.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from itertools import pairwise

from ampscope.analysis.compiled_runs import (
    EAGER_RANDOM,
    UNSEEN,
    apart,
    departure,
    repeating,
    unjudged,
)
from ampscope.analysis.control_losses import difference
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.precision_use import MIN_COMPARED
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import (
    BEHIND_APART,
    BEHIND_SHARE,
    LEARNS_SHARE,
    TAIL_SCATTER,
    Symptom,
    symptoms,
)
from ampscope.control import COMPILED, Control
from ampscope.diagnosis.captured_step import cures_the_step, is_captured, of_captured_step
from ampscope.diagnosis.findings import Diagnosis, Finding, diagnose
from ampscope.observations import COMPILED_NOTE
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
            if not is_open(diagnosis.findings[0], finding, evidence):
                continue
            own = set(finding.verdict.fix.controls)
            own -= set(diagnosis.findings[0].verdict.fix.controls)
            alone = {name: cured for name, cured in outcomes.items() if name in own}
        if (place or in_vain) and any(cured is True for cured in alone.values()):
            kept = list(diagnosis.findings)
            kept.insert(0, kept.pop(place))
            return dataclasses.replace(diagnosis, findings=tuple(kept))
    return diagnosis


def is_open(first: Finding, second: Finding, evidence: Evidence) -> bool:
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
    as many steps. None when there are too few to compare, or when the reference does not train."""
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
    again = diagnose(Evidence({"as_is": fixed, "fp32": evidence.fp32 or fixed}, evidence.policy))
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


# A script that compiles is not accused of what only its eager code does.
#
# A diagnosis judges the eager code that compiled code was made from. Compiled code may compute
# otherwise: a fused chain of pointwise ops keeps its intermediate results in fp32. So the script
# runs once more with torch.compile on (the control ``compiled``), watched from outside compiled
# code:
#
#     it trains       no fault; a note says what would fail in eager mode
#     it fails too    the finding stands
#     it did not run  nothing is decided
#
# Where nothing is wrong in eager mode it runs compiled as well: numbers that leave the eager run's
# are a finding of their own (:mod:`ampscope.analysis.compiled_runs`).
#
# A finding about the script's own text (an order of calls, a state that is not restored) is the
# same either way, as are data that are bad before any model sees them: it stands. So does one whose
# only symptom cannot be seen from outside compiled code. Where a CPU rehearses CUDA, the compiled
# code of a GPU cannot be had: a script that trains compiled on the CPU is then undecided.


_NO_COMPILER = frozenset({"InvalidCxxCompiler", "CppCompileError"})
ALIKE = (
    "With torch.compile on, its first losses and gradient norms are as near to eager code's as "
    "half precision's own rounding explains ({:,} steps ran)."
)
OTHER_RANDOM = (
    "With torch.compile on it draws other random numbers (of dropout, for example); with those of "
    "eager code its first losses and gradient norms are eager code's, up to rounding."
)
UNKNOWN_LAYER = "The further runs do not tell which layer of the compiler does it."
FAILS_TOO = "Ops were judged in eager mode; with torch.compile on the script fails too."


def wants_compiled(diagnosis: Diagnosis, evidence: Evidence) -> bool:
    """Whether the script has to run compiled before it is accused, or acquitted. A GPU's compiled
    code cannot be had on a CPU: there a clean bill stays one of eager code."""
    if COMPILED_NOTE not in evidence.baseline.outcome.notes or COMPILED in evidence.runs:
        return False
    acquits = diagnosis.verdict == "no_fault" and evidence.policy != "rehearsal"
    return acquits or _is_of_ops(diagnosis)


def judged(evidence: Evidence) -> Diagnosis:
    """The rules' diagnosis, less what the compiled run acquits the script of, and less what one
    captured step cannot decide."""
    diagnosis = of_captured_step(diagnose(evidence), evidence)
    run = evidence.runs.get(COMPILED)
    if run is None:
        return diagnosis
    why = unjudged(evidence.runs, COMPILED, MIN_COMPARED)
    if diagnosis.verdict == "no_fault":
        return _acquitted(diagnosis, evidence, why)
    if not _is_of_ops(diagnosis):
        return diagnosis
    if not why and _fails(run, evidence):
        return dataclasses.replace(diagnosis, notes=(FAILS_TOO,))
    if not why and evidence.policy == "rehearsal":
        why = "it trains when it is compiled for this CPU, and a GPU's cannot be rehearsed here"
    what = _what(diagnosis)
    if why:
        return dataclasses.replace(
            diagnosis,
            verdict="inconclusive",
            findings=(),
            undecided=f"Undetermined: in eager mode this is seen: {what} The script compiles its "
            f"code, and its compiled code was not judged: {why}.",
        )
    note = (
        f"The script would fail in eager mode: {what} Compiled, it trains: "
        f"{len(run.steps):,} "
        "optimizer steps ran with torch.compile on, without a bad one. Compiled code keeps the "
        "intermediate results of a fused chain of ops in fp32."
    )
    return dataclasses.replace(
        diagnosis, verdict="no_fault", findings=(), symptoms=(), notes=(note,)
    )


def _acquitted(diagnosis: Diagnosis, evidence: Evidence, why: str) -> Diagnosis:
    """A clean bill of the eager run, with what its compiled run says; ``why`` it says nothing."""
    run = evidence.runs[COMPILED]
    if run.outcome.error_type in _NO_COMPILER:
        why = "this machine has no C++ compiler that torch.compile could use"
    elif why and run.has_exception:
        text = f"Undetermined: in eager mode the script trains. With torch.compile on {why}."
        return dataclasses.replace(diagnosis, verdict="inconclusive", undecided=text)
    if why:
        return dataclasses.replace(diagnosis, notes=(f"Compiled code was not judged: {why}.",))
    found = departure(evidence.runs)
    if found is None:
        return dataclasses.replace(diagnosis, notes=(ALIKE.format(len(run.steps)),))
    drawn = evidence.runs.get(EAGER_RANDOM)
    is_drawn = drawn is not None and not apart(evidence.runs, EAGER_RANDOM)
    if is_drawn and not repeating(evidence.runs):
        return dataclasses.replace(diagnosis, notes=(OTHER_RANDOM,))
    text = f"Undetermined: eager code trains; compiled, {found.words}. {UNKNOWN_LAYER}"
    return dataclasses.replace(diagnosis, verdict="inconclusive", undecided=text)


def _is_of_ops(diagnosis: Diagnosis) -> bool:
    """Whether all that speaks against the script is what its ops computed."""
    if not set(diagnosis.symptoms) - UNSEEN:
        return False
    return all(f.verdict.op if f.rule.in_ops is None else f.rule.in_ops for f in diagnosis.findings)


def _what(diagnosis: Diagnosis) -> str:
    """What the eager run shows, as the rest of a sentence."""
    if diagnosis.findings:
        reason = diagnosis.findings[0].verdict.reason
        return reason if reason.endswith(".") else f"{reason}."
    return "; ".join(diagnosis.symptoms) + "."


def _fails(run: RunView, evidence: Evidence) -> bool:
    """Whether a bad step is seen in the compiled run, or its loss leaves the fp32 control's."""
    if run.bad_loss_steps or run.weights_broken or run.has_exception:
        return True
    if symptoms(run, evidence.fp32) - UNSEEN:
        return True
    return follows(run, evidence.fp32) is False
