"""Skipped steps: why each was skipped, and which parameters held Inf or NaN, in the order in which
backward reached them.

The first parameter in backward order is nearest to where the trouble began; the rest mostly inherit
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampscope.numerics.formats import FP16
from ampscope.records import StepRecord

WITHOUT_SHADOW = "not explained without an fp32 shadow"
UNSCALED = 1.0
JUMP = 2.0  # times the loss of the step before: a bad update, not the batches' own spread
NEAR = 20  # steps before and after; over more, gradients themselves may halve


class SkipCause(StrEnum):
    """Why a step was left out: the search for a scale, a spike of the gradients, a fault.

    calibration     no step of the same optimizer was taken yet, its next one is at a smaller scale,
                    and none near it at this scale or a larger one: how GradScaler finds its scale
    growth probing  the same right after the scale had grown, while it comes down to where it was:
                    the larger scale was tried and refused
    spike           steps near it were taken at this scale, and this step's own gradients were too
                    large for it in fp32 as well (a shadow was run at the skip); or, without a
                    shadow: the loss had doubled, the first bad gradient holds Inf and no NaN, and
                    the next step was taken at half the scale
    NaN alone       no weight's gradient holds Inf, some hold NaN: a formula gave 0/0 or the like,
                    and no scale helps; or Inf met Inf or zero before it came to a weight, which the
                    gradients of outputs show
    fault           the loss itself was not finite, fp32's gradients are not finite either, or they
                    still were not at a scale of 1, where nothing is multiplied any more
    unclear         none of these: where a step near it was taken at this scale, a batch with large
                    gradients and one with a NaN look alike
    """

    CALIBRATION = "calibration"
    GROWTH = "growth probing"
    SPIKE = "spike"
    NAN_ALONE = "NaN alone"
    FAULT = "fault"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class SkipEvidence:
    """What was recorded of a step's bad gradients: elements with NaN and with Inf in the first of
    them in backward order and in all; ``fp32_largest`` is the largest magnitude of the same
    gradients in fp32, unscaled, where a shadow was run at the skip."""

    first_nan: int = 0
    first_inf: int = 0
    nan: int = 0
    inf: int = 0
    fp32_largest: float | None = None


def skip_causes(
    steps: Sequence[StepRecord],
    optimizers: Mapping[int, str] | None = None,
    evidence: Mapping[int, SkipEvidence] | None = None,
) -> dict[int, SkipCause]:
    """Of every skipped step in order. ``optimizers`` names the optimizer of each step where a run
    has several: a scaler that they share skips the step of one and takes the other's. ``evidence``
    is what is known of the gradients of skipped steps."""
    seen = evidence or {}
    own: dict[str, list[StepRecord]] = {}
    for step in steps:
        own.setdefault((optimizers or {}).get(step.step, ""), []).append(step)
    found = {number: cause for series in own.values() for number, cause in _causes(series, seen)}
    return dict(sorted(found.items()))


def _causes(
    series: Sequence[StepRecord], evidence: Mapping[int, SkipEvidence]
) -> Iterator[tuple[int, SkipCause]]:
    """Of the skipped steps of one optimizer, last first."""
    next_scale: float | None = None  # of the next step that was taken
    searches = _searches(series)
    for place in reversed(range(len(series))):
        step = series[place]
        if step.skipped:
            before = series[max(place - NEAR, 0) : place]
            after = series[place + 1 : place + NEAR + 1]
            known = evidence.get(step.step, SkipEvidence())
            search = searches.get(step.step)
            yield step.step, _cause(step, search, next_scale, before, after, known)
        else:
            next_scale = step.scale


def _searches(series: Sequence[StepRecord]) -> dict[int, SkipCause]:
    """Of each skip with which a search can come down: from the first scale of all, or from one to
    which the scale has just grown to the one before. A descent that an overflow began at a scale at
    which steps were taken is no search, however long it is."""
    found: dict[int, SkipCause] = {}
    taken: StepRecord | None = None  # the last one
    for step in series:
        if not step.skipped:
            taken = step
        elif taken is None:
            found[step.step] = SkipCause.CALIBRATION
        elif (taken.scale or 0.0) < (step.scale or 0.0):
            found[step.step] = SkipCause.GROWTH
    return found


def _cause(
    step: StepRecord,
    search: SkipCause | None,
    next_scale: float | None,
    before: Sequence[StepRecord],
    after: Sequence[StepRecord],
    known: SkipEvidence,
) -> SkipCause:
    if step.loss is not None and not math.isfinite(step.loss):
        return SkipCause.FAULT
    if step.scale is None:
        return SkipCause.UNCLEAR
    largest = known.fp32_largest
    if largest is not None and not math.isfinite(largest):
        return SkipCause.FAULT
    nan_alone = known.nan > 0 and known.inf == 0
    if step.scale <= UNSCALED:
        return SkipCause.NAN_ALONE if nan_alone else SkipCause.FAULT
    taken = [s.scale for s in (*before, *after) if not s.skipped and s.scale is not None]
    if search is not None and next_scale is not None and max((*taken, next_scale)) < step.scale:
        return search
    if largest is not None and largest * step.scale > FP16.max:
        return SkipCause.SPIKE
    if nan_alone:
        return SkipCause.NAN_ALONE
    halved = bool(after) and not after[0].skipped and (after[0].scale or 0.0) <= step.scale / 2
    if halved and known.first_inf and not known.first_nan and _has_doubled(step, before):
        return SkipCause.SPIKE
    return SkipCause.UNCLEAR


def _has_doubled(step: StepRecord, before: Sequence[StepRecord]) -> bool:
    """The loss of this step is at least twice that of the step before it."""
    last = before[-1].loss if before else None
    if last is None or step.loss is None or not math.isfinite(last):
        return False
    return last > 0 and step.loss >= JUMP * last


def counted(causes: dict[int, SkipCause]) -> str:
    """ "3 calibrations, 1 fault"; "" without a skip."""
    names = {
        SkipCause.CALIBRATION: ("calibration", "calibrations"),
        SkipCause.GROWTH: ("probe of a grown scale", "probes of a grown scale"),
        SkipCause.SPIKE: ("spike", "spikes"),
        SkipCause.NAN_ALONE: ("NaN alone", "NaN alone"),
        SkipCause.FAULT: ("fault", "faults"),
        SkipCause.UNCLEAR: (WITHOUT_SHADOW, WITHOUT_SHADOW),
    }
    parts = []
    for cause, (one, many) in names.items():
        count = sum(c is cause for c in causes.values())
        if count:
            parts.append(f"{count:,} {one if count == 1 else many}")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class BadStep:
    """One step that was skipped, or whose gradients were not finite although it was taken."""

    step: int
    scale: float | None
    skipped: bool
    parameter_count: int  # parameters whose gradients held NaN or Inf
    first_parameter: str  # the first that backward reached, "" when none was recorded
    cause: SkipCause | None = None  # of a skipped step


def bad_steps(
    steps: Sequence[StepRecord],
    firsts: Mapping[int, tuple[int, str]],
    optimizers: Mapping[int, str] | None = None,
    evidence: Mapping[int, SkipEvidence] | None = None,
) -> list[BadStep]:
    """Skipped steps and steps with non-finite gradients. ``firsts`` maps a step to the number of
    its non-finite parameters and the first of them in backward order; ``optimizers`` to whose step
    it is; ``evidence`` is what is known of the bad gradients."""
    causes = skip_causes(steps, optimizers, evidence)
    return [
        BadStep(s.step, s.scale, s.skipped, *firsts.get(s.step, (0, "")), causes.get(s.step))
        for s in steps
        if s.skipped or s.step in firsts
    ]
