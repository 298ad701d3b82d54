"""Each skipped step: calibration, which falls with the scale, or a fault, which no scale mends.

A skip is how GradScaler finds its scale. It is calibration when the same training goes on finite at
a smaller scale. It is a fault when the loss itself was not finite, or when gradients still were not
at a scale of 1, where nothing is multiplied any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from ampscope.records import StepRecord

UNSCALED = 1.0


class SkipCause(StrEnum):
    """Why a step was left out."""

    CALIBRATION = "calibration"
    FAULT = "fault"
    UNKNOWN = "unknown"  # nothing finite came after it


def skip_causes(steps: Sequence[StepRecord]) -> dict[int, SkipCause]:
    """Of every skipped step in order."""
    found: dict[int, SkipCause] = {}
    finite_at: float | None = None  # scale of the next step that was taken
    for step in reversed(steps):
        if not step.skipped:
            finite_at = step.scale
        else:
            found[step.step] = _cause(step, finite_at)
    return dict(reversed(found.items()))


def _cause(step: StepRecord, finite_at: float | None) -> SkipCause:
    if step.loss is not None and not math.isfinite(step.loss):
        return SkipCause.FAULT
    if step.scale is None:
        return SkipCause.UNKNOWN
    if step.scale <= UNSCALED:
        return SkipCause.FAULT
    if finite_at is None:
        return SkipCause.UNKNOWN
    return SkipCause.CALIBRATION if finite_at < step.scale else SkipCause.FAULT


def counted(causes: dict[int, SkipCause]) -> str:
    """ "3 calibrations, 1 fault"; "" without a skip."""
    names = {
        SkipCause.CALIBRATION: ("calibration", "calibrations"),
        SkipCause.FAULT: ("fault", "faults"),
        SkipCause.UNKNOWN: ("of unknown cause", "of unknown cause"),
    }
    parts = []
    for cause, (one, many) in names.items():
        count = sum(c is cause for c in causes.values())
        if count:
            parts.append(f"{count:,} {one if count == 1 else many}")
    return ", ".join(parts)
