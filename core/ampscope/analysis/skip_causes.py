"""Why each skipped step was skipped: the search for a scale, a spike of the gradients, a fault.

calibration     the same optimizer's next step is taken at a smaller scale, and none near it was
                taken at this scale or a larger one: how GradScaler finds its scale
growth probing  calibration right after the scale had grown: the larger scale was tried and refused
spike           steps near it were taken at this scale, and this step's own gradients were too large
                for it in fp32 as well (a shadow was run at the skip); or, without a shadow: the
                loss had doubled, the first bad gradient holds Inf and no NaN, and the next step was
                taken at half the scale
born as NaN     no gradient holds Inf, some hold NaN: nothing overflowed, a formula gave 0/0 or the
                like, and no scale helps
fault           the loss itself was not finite, fp32's gradients are not finite either, or they
                still were not at a scale of 1, where nothing is multiplied any more
unclear         none of these: where a step near it was taken at this scale, a batch with large
                gradients and one with a NaN look alike
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampscope.formats import FP16
from ampscope.records import StepRecord

UNSCALED = 1.0
JUMP = 2.0  # times the loss of the step before: a bad update, not the batches' own spread
NEAR = 20  # steps before and after; over more, gradients themselves may halve


class SkipCause(StrEnum):
    """Why a step was left out."""

    CALIBRATION = "calibration"
    GROWTH = "growth probing"
    SPIKE = "spike"
    BORN_NAN = "born as NaN"
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
    for place in reversed(range(len(series))):
        step = series[place]
        if step.skipped:
            before = series[max(place - NEAR, 0) : place]
            after = series[place + 1 : place + NEAR + 1]
            known = evidence.get(step.step, SkipEvidence())
            yield step.step, _cause(step, next_scale, before, after, known)
        else:
            next_scale = step.scale


def _cause(
    step: StepRecord,
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
    born_nan = known.nan > 0 and known.inf == 0
    if step.scale <= UNSCALED:
        return SkipCause.BORN_NAN if born_nan else SkipCause.FAULT
    borne = [s.scale for s in (*before, *after) if not s.skipped and s.scale is not None]
    if next_scale is not None and max((*borne, next_scale)) < step.scale:
        last = before[-1] if before else None
        grew = last is not None and not last.skipped and (last.scale or 0.0) < step.scale
        return SkipCause.GROWTH if grew else SkipCause.CALIBRATION
    if born_nan:
        return SkipCause.BORN_NAN
    if largest is not None and largest * step.scale > FP16.max:
        return SkipCause.SPIKE
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
        SkipCause.BORN_NAN: ("born as NaN", "born as NaN"),
        SkipCause.FAULT: ("fault", "faults"),
        SkipCause.UNCLEAR: ("of unclear cause", "of unclear cause"),
    }
    parts = []
    for cause, (one, many) in names.items():
        count = sum(c is cause for c in causes.values())
        if count:
            parts.append(f"{count:,} {one if count == 1 else many}")
    return ", ".join(parts)
