"""Which loss scales keep the gradients of every module within a format, read off histograms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.exponents import NAN, NEG_INF, POS_INF, max_exponent, safe_scale_window
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


def common_window(frame: Frame, fmt: NumberFormat) -> ScaleWindow | None:
    """The window of all modules of a frame of gradients; None where a gradient is not finite, or
    none is there."""
    if frame.rows[:, [NAN, POS_INF, NEG_INF]].any():
        return None
    recorded = round(math.log2(frame.scale))
    windows, spans = {}, []
    for module, row in zip(frame.modules, frame.rows, strict=True):
        window = safe_scale_window(row, fmt, LOST_SHARE)
        if window is not None:
            windows[module] = (window[0] + recorded, window[1] + recorded)
        elif max_exponent(row) is not None:
            spans.append(module)
    if spans:
        return ScaleWindow(1, 0, spans[0], spans[0], tuple(spans))
    if not windows:
        return None
    lowest = max(windows, key=lambda m: windows[m][0])
    highest = min(windows, key=lambda m: windows[m][1])
    return ScaleWindow(windows[lowest][0], windows[highest][1], lowest, highest, ())
