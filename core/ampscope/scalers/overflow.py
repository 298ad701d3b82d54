"""Which loss scales overflow the gradients of a recorded step, read off its histograms.

A histogram recorded at scale S says in which powers of two the scaled gradients lay. At k S they
lie log2 k bins further. Where k is a power of two the answer is exact: an fp16 number times 2^j is
an fp16 number, so gradients whose largest lies in [2^e, 2^(e+1)) overflow at 2^j S when e + j
exceeds 15, and do not otherwise. A scale between powers of two moves a bin across two others; where
the upper one lies beyond the limit and the lower does not, the bin is too coarse to decide.

What overflows is what is computed in the narrow format: output gradients that flow in it, and
weight gradients of the modules that have such (autocast computes those in fp16 and hands them to
fp32 weights). A gradient inside a module, between two of its functional ops, is not recorded; its
overflow is seen at the scale that was run, and not predicted for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ampscope.exponents import ABOVE, EXPONENTS, Raw
from ampscope.formats import NumberFormat
from ampscope.records import Frame, Role


class Fate(StrEnum):
    """Of a step's gradients at some scale."""

    FINITE = "finite"
    OVERFLOW = "overflow"
    COARSE = "coarse"  # the bin of the largest straddles the limit
    UNKNOWN = "unknown"  # it overflowed when it was recorded, or has no histogram


@dataclass(frozen=True, slots=True)
class StepGradients:
    """What a step's histograms say about other scales.

    ``top`` is the exponent of the largest gradient that is bound to the narrow format, at the scale
    of the step; None where there is none, or where the step has no histogram.
    """

    step: int
    scale: float
    found_inf: bool  # as recorded at ``scale``
    top: int | None
    max_exponent: int  # of the narrow format, 15 for fp16
    has_histogram: bool = True


def step_gradients(
    step: int, scale: float, found_inf: bool, frames: Iterable[Frame], narrow: NumberFormat
) -> StepGradients:
    """Of the frames of output and weight gradients of one step, as they were recorded."""
    counts = [bound_counts(frame, modules) for frame, modules in _bound(frames, narrow.name)]
    tops = [int(EXPONENTS[np.flatnonzero(row)[-1]]) for row in counts if row.any()]
    return StepGradients(
        step, scale, found_inf, max(tops, default=None), narrow.max_exponent, bool(counts)
    )


def narrow_counts(frames: Iterable[Frame], narrow: NumberFormat) -> Raw:
    """Finite counts [ABOVE + 1] of the output gradients that flow in ``narrow``, all modules."""
    total = np.zeros(ABOVE + 1, np.int64)
    for frame in frames:
        if frame.role is Role.GRAD_OUTPUT:
            keep = [name == narrow.name for name in frame.dtypes]
            total += frame.rows[keep][:, : ABOVE + 1].sum(axis=0)
    return total


def fate(gradients: StepGradients, scale: float) -> Fate:
    """What would have become of the step at ``scale``."""
    if scale == gradients.scale:
        return Fate.OVERFLOW if gradients.found_inf else Fate.FINITE
    if math.isinf(scale):
        return Fate.OVERFLOW
    if not (0 < gradients.scale < math.inf and scale > 0):
        return Fate.UNKNOWN  # at 0, where a scaler ends that skipped 165 steps, nothing is left
    if gradients.found_inf:
        return Fate.OVERFLOW if scale > gradients.scale else Fate.UNKNOWN
    if scale < gradients.scale:
        return Fate.FINITE  # a smaller scale overflows nothing that was finite
    if not gradients.has_histogram:
        return Fate.UNKNOWN
    if gradients.top is None:
        return Fate.FINITE
    shift = math.log2(scale) - math.log2(gradients.scale)  # their quotient may leave the range
    low, high = gradients.top + math.floor(shift), gradients.top + math.ceil(shift)
    if high <= gradients.max_exponent:
        return Fate.FINITE
    return Fate.OVERFLOW if low > gradients.max_exponent else Fate.COARSE


def bound_counts(frame: Frame, modules: frozenset[int]) -> Raw:
    """Finite counts of the rows of ``modules``, summed."""
    keep = [module in modules for module in frame.modules]
    return np.asarray(frame.rows[keep][:, : ABOVE + 1].sum(axis=0))


def _bound(frames: Iterable[Frame], dtype: str) -> list[tuple[Frame, frozenset[int]]]:
    """Each frame with the modules whose gradients are computed in ``dtype``."""
    every = list(frames)
    narrow = frozenset(
        module
        for frame in every
        if frame.role is Role.GRAD_OUTPUT
        for module, name in zip(frame.modules, frame.dtypes, strict=True)
        if name == dtype
    )
    return [(frame, narrow) for frame in every if frame.role.is_gradient]
