"""Which loss scales keep the gradients of every module within a format, read off histograms.

Where a frame has gradients in the format itself, those alone count: what autocast leaves in fp32
takes any scale that fp16 does. Where it has none, the question is what the format would hold, and
all count. Weight gradients, which autocast computes in fp16 and hands to fp32 weights, limit a
scale from above: they sum over a batch, and may be far larger than what flows out of a module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampscope.numerics import histogram
from ampscope.numerics.formats import NumberFormat
from ampscope.records import Frame

LOST_SHARE = 1e-3  # of a module's gradients: what a healthy run loses at any scale


@dataclass(frozen=True, slots=True)
class ScaleWindow:
    """log2 of the lowest and highest loss scale that suit every module, and which module sets each.

    ``low`` > ``high``: no single scale suits all. ``spans``: modules that no scale suits at all.
    """

    low: int
    high: int
    lowest: int  # module that needs at least 2^low
    highest: int  # module that can take at most 2^high
    spans: tuple[int, ...]


def common_window(
    frame: Frame, fmt: NumberFormat, weights: Frame | None = None
) -> ScaleWindow | None:
    """The window of all modules of a frame of gradients; None where a gradient is not finite, or
    none is there."""
    found = _limits(frame, fmt, weights)
    if found is None:
        return None
    modules, low, high = found
    spans = tuple(modules[i] for i in np.flatnonzero(low > high))
    if spans:
        return ScaleWindow(1, 0, spans[0], spans[0], spans)
    lowest, highest = int(low.argmax()), int(high.argmin())
    return ScaleWindow(int(low[lowest]), int(high[highest]), modules[lowest], modules[highest], ())


@dataclass(frozen=True, slots=True)
class ModuleWindow:
    """log2 of the lowest and highest loss scale that suit one module; ``low`` > ``high``: none."""

    module: int
    low: int
    high: int


def module_windows(
    frame: Frame, fmt: NumberFormat, weights: Frame | None = None
) -> tuple[ModuleWindow, ...]:
    """Of every row of a frame of finite gradients that counts, in the frame's order; a module that
    is there in two dtypes has two. ``weights`` are the weight gradients of the same step."""
    found = _limits(frame, fmt, weights)
    if found is None:
        return ()
    modules, low, high = found
    pairs = zip(modules, low.tolist(), high.tolist(), strict=True)
    return tuple(ModuleWindow(module, a, b) for module, a, b in pairs)


def _limits(
    frame: Frame, fmt: NumberFormat, weights: Frame | None
) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]] | None:
    """Modules with gradients, and the lowest and highest exponent of a scale for each."""
    if not all(_is_finite(f) for f in (frame, weights) if f is not None):
        return None
    finite = frame.rows[:, : histogram.ABOVE + 1]
    there = np.flatnonzero(finite.any(axis=1) & _counts(frame, fmt))
    if not there.size:
        return None
    # For all rows at once: 500 modules take 1 ms and not 300.
    finite, modules = finite[there], [frame.modules[i] for i in there]
    allowed = (LOST_SHARE * finite.sum(axis=1)).astype(np.int64)
    first = histogram.EXPONENTS[(np.cumsum(finite, axis=1) > allowed[:, None]).argmax(axis=1)]
    low = fmt.zero_below_exponent - first + round(math.log2(frame.scale))
    high = _highest(finite, frame.scale, fmt)
    if weights is not None:
        highest = _highest_by_weights(weights, fmt)
        high = np.array([min(h, highest.get(m, h)) for m, h in zip(modules, high, strict=True)])
    return modules, low, high


def _is_finite(frame: Frame) -> bool:
    """Whether all its gradients are, and its scale: 165 skipped steps in a row take that to 0."""
    bad = frame.rows[:, [histogram.NAN, histogram.POS_INF, histogram.NEG_INF]].any()
    return not bad and 0 < frame.scale < math.inf


def _counts(frame: Frame, fmt: NumberFormat) -> NDArray[np.bool_]:
    """Which rows count."""
    own = np.array([name == fmt.name for name in frame.dtypes], np.bool_)
    return own if own.any() else ~own


def _highest(finite: histogram.Raw, scale: float, fmt: NumberFormat) -> NDArray[np.int64]:
    """log2 of the highest scale for each row that has any. The format's top bin stays free, as
    values in it may exceed the largest number by rounding."""
    top = histogram.EXPONENTS[histogram.ABOVE - (finite[:, ::-1] > 0).argmax(axis=1)]
    return np.asarray(fmt.max_exponent - 1 - top + round(math.log2(scale)))


def _highest_by_weights(weights: Frame, fmt: NumberFormat) -> dict[int, int]:
    """log2 of the highest scale at which each module's weight gradients stay finite."""
    finite = weights.rows[:, : histogram.ABOVE + 1]
    there = np.flatnonzero(finite.any(axis=1))
    highest = _highest(finite[there], weights.scale, fmt).tolist()
    pairs = zip((weights.modules[i] for i in there), highest, strict=True)
    lowest: dict[int, int] = {}
    for module, high in pairs:
        lowest[module] = min(high, lowest.get(module, high))
    return lowest


def excluded_modules(frame: Frame, fmt: NumberFormat) -> dict[int, str]:
    """Modules with gradients that no window counts, because none of them is in the format, with the
    dtypes that they are in: fp32 for a loss under autocast. Empty where all modules count."""
    counted = _counts(frame, fmt)
    inside = {module for module, counts in zip(frame.modules, counted, strict=True) if counts}
    found: dict[int, str] = {}
    for module, dtype, row in zip(frame.modules, frame.dtypes, frame.rows, strict=True):
        if module not in inside and row[: histogram.ABOVE + 1].any():
            found[module] = f"{found[module]}+{dtype}" if module in found else dtype
    return found
