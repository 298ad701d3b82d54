"""Each skipped step: calibration, which falls with the scale, or a fault, which no scale mends.

A skip is how GradScaler finds its scale. It is calibration when the same optimizer's next step is
taken at a smaller scale, and none near it was taken at this scale or a larger one: where one was,
a batch with large gradients and one with a NaN look alike. It is a fault when the loss itself was
not finite, or when gradients still were not at a scale of 1, where nothing is multiplied any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from ampscope.records import StepRecord

UNSCALED = 1.0
NEAR = 20  # steps before and after; over more, gradients themselves may halve


class SkipCause(StrEnum):
    """Why a step was left out."""

    CALIBRATION = "calibration"
    FAULT = "fault"
    UNCLEAR = "unclear"


def skip_causes(
    steps: Sequence[StepRecord], optimizers: Mapping[int, str] | None = None
) -> dict[int, SkipCause]:
    """Of every skipped step in order. ``optimizers`` names the optimizer of each step where a run
    has several: a scaler that they share skips the step of one and takes the other's."""
    own: dict[str, list[StepRecord]] = {}
    for step in steps:
        own.setdefault((optimizers or {}).get(step.step, ""), []).append(step)
    found = {number: cause for series in own.values() for number, cause in _causes(series)}
    return dict(sorted(found.items()))


def _causes(series: Sequence[StepRecord]) -> Iterator[tuple[int, SkipCause]]:
    """Of the skipped steps of one optimizer, last first."""
    next_scale: float | None = None  # of the next step that was taken
    for place in reversed(range(len(series))):
        step = series[place]
        if step.skipped:
            near = series[max(place - NEAR, 0) : place + NEAR + 1]
            yield step.step, _cause(step, next_scale, near)
        else:
            next_scale = step.scale


def _cause(step: StepRecord, next_scale: float | None, near: Sequence[StepRecord]) -> SkipCause:
    if step.loss is not None and not math.isfinite(step.loss):
        return SkipCause.FAULT
    if step.scale is None:
        return SkipCause.UNCLEAR
    if step.scale <= UNSCALED:
        return SkipCause.FAULT
    borne = [s.scale for s in near if not s.skipped and s.scale is not None]
    if next_scale is None or max((*borne, next_scale)) >= step.scale:
        return SkipCause.UNCLEAR
    return SkipCause.CALIBRATION


def counted(causes: dict[int, SkipCause]) -> str:
    """ "3 calibrations, 1 fault"; "" without a skip."""
    names = {
        SkipCause.CALIBRATION: ("calibration", "calibrations"),
        SkipCause.FAULT: ("fault", "faults"),
        SkipCause.UNCLEAR: ("of unclear cause", "of unclear cause"),
    }
    parts = []
    for cause, (one, many) in names.items():
        count = sum(c is cause for c in causes.values())
        if count:
            parts.append(f"{count:,} {one if count == 1 else many}")
    return ", ".join(parts)
