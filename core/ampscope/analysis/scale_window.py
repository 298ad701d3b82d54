"""Which loss scales keep the gradients of every module within a format, read off histograms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampscope.exponents import ABOVE, EXPONENTS, NAN, NEG_INF, POS_INF
from ampscope.formats import NumberFormat
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
    highest: int  # module that bears at most 2^high
    spans: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleWindow:
    """log2 of the lowest and highest loss scale that suit one module; ``low`` > ``high``: none."""

    module: int
    low: int
    high: int


def module_windows(frame: Frame, fmt: NumberFormat) -> tuple[ModuleWindow, ...]:
    """Of every row of a frame of finite gradients, in the frame's order; a module that is there in
    two dtypes has two."""
    found = _limits(frame, fmt)
    if found is None:
        return ()
    modules, low, high = found
    pairs = zip(modules, low.tolist(), high.tolist(), strict=True)
    return tuple(ModuleWindow(module, a, b) for module, a, b in pairs)


def common_window(frame: Frame, fmt: NumberFormat) -> ScaleWindow | None:
    """The window of all modules of a frame of gradients; None where a gradient is not finite, or
    none is there."""
    found = _limits(frame, fmt)
    if found is None:
        return None
    modules, low, high = found
    spans = tuple(modules[i] for i in np.flatnonzero(low > high))
    if spans:
        return ScaleWindow(1, 0, spans[0], spans[0], spans)
    lowest, highest = int(low.argmax()), int(high.argmin())
    return ScaleWindow(int(low[lowest]), int(high[highest]), modules[lowest], modules[highest], ())


def _limits(
    frame: Frame, fmt: NumberFormat
) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]] | None:
    """Modules with gradients, and the lowest and highest exponent of a scale for each."""
    if frame.rows[:, [NAN, POS_INF, NEG_INF]].any() or not 0 < frame.scale < math.inf:
        return None  # a scaler that skipped 165 steps in a row arrives at 0
    finite = frame.rows[:, : ABOVE + 1]
    there = np.flatnonzero(finite.any(axis=1))
    if not there.size:
        return None
    # As exponents.safe_scale_window, for all rows at once: 500 modules take 1 ms and not 300.
    finite, modules = finite[there], [frame.modules[i] for i in there]
    allowed = (LOST_SHARE * finite.sum(axis=1)).astype(np.int64)
    first = EXPONENTS[(np.cumsum(finite, axis=1) > allowed[:, None]).argmax(axis=1)]
    top = EXPONENTS[ABOVE - (finite[:, ::-1] > 0).argmax(axis=1)]
    recorded = round(math.log2(frame.scale))
    low = fmt.zero_below_exponent - first + recorded
    high = fmt.max_exponent - 1 - top + recorded
    return modules, low, high
