"""Colour strength for shares on a log scale: from one element in a million to all of them.

Anything rarer looks like one in a million; it is never invisible.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ampscope.exponents import Raw
from app.palette import OUTLINE

WEAKEST, STRONGEST = -6.0, 0.0  # log10 of the share
WEAKEST_ALPHA = 0.22  # still 1.2:1 against both backgrounds beside an empty cell
SHARE_BAR_PX = 40  # height it needs below the plot
SHARE_BAR = {
    "tickvals": [-6, -4, -2, 0],
    "ticktext": ["≤ 1 ppm", "0.01 %", "1 %", "100 %"],
    "orientation": "h",  # below the plot: the names of modules need the width
    "tickangle": 0,
    "thickness": 10,
    "lenmode": "pixels",
    "len": 190,
    "x": 0.5,
    "yref": "container",
    "y": 0,
    "yanchor": "bottom",
    "outlinewidth": 0.5,
    "outlinecolor": OUTLINE,
}


def log_share(counts: Raw, totals: Raw) -> NDArray[np.float32]:
    """log10 of ``counts / totals``; NaN, which draws nothing, where there is nothing."""
    out = np.full(counts.shape, np.nan)
    np.log10(counts / np.maximum(totals, 1), out=out, where=counts > 0)
    return out.astype(np.float32)


def fade(color: str) -> list[list[object]]:
    """Colour scale of one hue, transparent at its weak end so that it suits any background."""
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return [[0, f"rgba({r},{g},{b},{WEAKEST_ALPHA})"], [1, f"rgba({r},{g},{b},1)"]]
