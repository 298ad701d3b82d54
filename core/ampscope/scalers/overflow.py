"""Which loss scales overflow the gradients of a recorded step, read off its histograms.

A histogram recorded at scale S says in which powers of two the scaled gradients lay. At another
scale k S they lie log2 k bins further, so whether the largest overflows in fp16 is known but for
its top bin: [2^15, 2^16) holds 65,504 and 65,520, of which the second rounds to infinity. There the
answer is "too coarse", unless that very scale was run.

Gradients in fp16 overflow on their way, at the op that makes them (grad_output and weight_grad both
count); a weight gradient in fp32 that is finite says nothing about its inputs, which is why both
roles are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ampscope.exponents import ABOVE, EXPONENTS, NAN, NEG_INF, POS_INF
from ampscope.formats import NumberFormat
from ampscope.records import Frame


class Fate(StrEnum):
    """Of a step's gradients at some scale."""

    FINITE = "finite"
    OVERFLOW = "overflow"
    FAULT = "fault"  # not finite at any scale: the loss, the data or a backward op made it
    COARSE = "coarse"  # the top bin lies in the format's own top bin
    UNKNOWN = "unknown"  # the recorded step overflowed, so how large its gradients are is lost


@dataclass(frozen=True, slots=True)
class StepGradients:
    """What a step's histograms say about other scales.

    ``top`` is the exponent of the largest gradient that is bound to a narrow format, at the scale
    of the step; None where none was recorded.
    """

    step: int
    scale: float
    found_inf: bool  # as recorded at ``scale``
    top: int | None
    max_exponent: int  # of the narrow format, 15 for fp16


def step_gradients(
    step: int, scale: float, found_inf: bool, frames: Iterable[Frame], narrow: NumberFormat
) -> StepGradients:
    """Of the gradients that flowed in ``narrow``; those in wider dtypes cannot overflow by it."""
    tops = [_top(frame, narrow.name) for frame in frames]
    known = [top for top in tops if top is not None]
    return StepGradients(step, scale, found_inf, max(known, default=None), narrow.max_exponent)


def fate(gradients: StepGradients, scale: float) -> Fate:
    """What would have become of the step at ``scale``."""
    if scale == gradients.scale:
        return Fate.OVERFLOW if gradients.found_inf else Fate.FINITE
    if not scale or not math.isfinite(scale):
        return Fate.OVERFLOW if math.isinf(scale) else Fate.UNKNOWN
    larger = scale > gradients.scale
    if gradients.found_inf:
        return Fate.OVERFLOW if larger else Fate.UNKNOWN
    if gradients.top is None or not larger:
        return Fate.FINITE  # a smaller scale overflows nothing that was finite
    # The whole bin moves; a scale between powers of two moves it between two bins.
    shift = math.log2(scale / gradients.scale)
    low, high = gradients.top + math.floor(shift), gradients.top + math.ceil(shift)
    if high < gradients.max_exponent:
        return Fate.FINITE
    return Fate.OVERFLOW if low > gradients.max_exponent else Fate.COARSE


def _top(frame: Frame, dtype: str) -> int | None:
    rows = [row for row, name in zip(frame.rows, frame.dtypes, strict=True) if name == dtype]
    if not rows:
        return None
    occupied = np.flatnonzero(np.asarray(rows)[:, : ABOVE + 1].any(axis=0))
    return int(EXPONENTS[occupied[-1]]) if occupied.size else None


def is_finite(frame: Frame) -> bool:
    """No NaN and no Inf in any row."""
    return not frame.rows[:, [NAN, POS_INF, NEG_INF]].any()
