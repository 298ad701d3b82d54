"""Every colour that carries meaning, once. Zones and non-finite are Okabe and Ito's palette
(jfly.uni-koeln.de/color, 2008), which people with any of the three colour deficiencies can tell
apart; the dtypes avoid all five of them, so a hue never means two things.

Sky blue and orange are lighter than 3:1 on white. They fill areas only, and an area is bordered
with :data:`OUTLINE` and labelled: meaning is never carried by colour alone.
tests/app/test_palette.py checks contrast on both backgrounds and distance under simulated
deficiency.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OUTLINE = "#76808E"  # at least 3:1 on the dashboard's light and dark background

LOST = "#0072B2"  # blue
SUBNORMAL = "#56B4E9"  # sky blue: what lies between lost and kept
NORMAL = "#009E73"  # bluish green
OVERFLOW = "#E69F00"  # orange
NONFINITE = "#D55E00"  # vermillion: NaN and Inf, and nothing else
ZERO = "#B7BDC6"  # was zero already: no information, no hue

ZONES: Mapping[str, str] = MappingProxyType(
    {
        "lost": LOST,
        "subnormal": SUBNORMAL,
        "normal": NORMAL,
        "overflow": OVERFLOW,
        "zero": ZERO,
        "nonfinite": NONFINITE,
    }
)

OTHER_DTYPE = "#8B95A3"  # integers, booleans, fp64 and mixtures
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "#66707F",  # slate: the plain case
        "tf32": "#8C6A4A",  # brown
        "bf16": "#9E9100",  # olive, the palette's yellow darkened until it reads on white
        "fp16": "#CC79A7",  # reddish purple
        "e4m3": "#7D4FBF",  # violet
        "e5m2": "#B48AE8",  # light violet
    }
)

MEASURE = "#5B7FD4"  # one curve of one run (loss, norm, scale) where no dtype names it


def dtype_color(name: str) -> str:
    """Colour of a dtype or of a precision mode (``fp16-noscaler`` is fp16's)."""
    return DTYPES.get(name.partition("-")[0], OTHER_DTYPE)


def text_on(color: str) -> str:
    """Black or white, whichever reads better on ``#rrggbb``: by WCAG 2.2's relative luminance, at
    0.179 of which both have the same contrast."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), light, strict=True))
    return "#000000" if luminance > 0.179 else "#FFFFFF"
