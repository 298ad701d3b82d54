"""Is what is wrong with a script gone in another run of it? Asked of every run with something
changed: a fix, or sites of half precision lifted to fp32.

It is gone where none of the script's symptoms is left (:mod:`ampscope.analysis.symptoms`), the run
comes to the end that its fp32 control comes to, and its loss follows the control's.
"""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

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

# With these a script leaves steps out, or ends, by itself: a fix has to bring the steps back.
GUARDED = frozenset({Symptom.ENDED, Symptom.DROPPED, Symptom.EXCEPTION})
AS_GOOD = 0.1  # of the first loss: no more above fp32's, where fp32 does not learn either
NUMBERS = frozenset({Symptom.LOSS, Symptom.WEIGHTS, Symptom.GRADIENTS, Symptom.DIVERGED})


def heals(run: RunView, evidence: Evidence) -> bool | None:
    """Whether what is wrong with the baseline is gone in ``run``. None: no symptom is left, and too
    few steps were made to compare the losses with the control's, or that does not train."""
    if not comes_to_its_end(run, evidence) or keeps_symptoms(run, evidence):
        return False
    return follows(run, evidence.fp32)


def comes_to_its_end(run: RunView, evidence: Evidence) -> bool:
    """Whether ``run`` made steps, without an exception, and came to the end that the fp32 control
    comes to: its exit status, and its number of steps where the baseline made another. What a time
    limit cut short is compared by its status alone."""
    fp32, before = evidence.fp32, evidence.baseline
    if not run.steps or run.has_exception:
        return False
    if fp32 is None or fp32.has_exception or not run.ended_itself:
        return True  # no end to come to; or it went on to a limit of the run
    if fp32.ended_itself and run.outcome.exit_code != fp32.outcome.exit_code:
        return False
    if not fp32.ended_itself and run.outcome.exit_code:
        return False
    guards = bool(evidence.symptoms & GUARDED or before.guarded_losses)
    if not guards or "time" in (fp32.outcome.ended, run.outcome.ended):
        return True
    return run.outcome.steps >= fp32.outcome.steps


def keeps_symptoms(run: RunView, evidence: Evidence) -> bool:
    """Whether some of the baseline's symptoms are left in ``run``."""
    return bool(symptoms(run, evidence.fp32) & evidence.symptoms - _of_its_search(run))


def trains(run: RunView) -> bool:
    """Its numbers stay finite, and its loss ends no higher than it began. Of a divergence that is
    none of AMP's, a fix is asked this in half precision and in fp32."""
    return not symptoms(run, None) & NUMBERS and _falls(run)


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
