"""Colours of a report's charts: those of the dashboard (app/palette.py, where the reasons stand).

A test holds the two together; a package cannot import the dashboard that is built on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OUTLINE = "#76808E"
NONFINITE = "#D55E00"
ZERO = "#B7BDC6"
MEASURE = "#5B7FD4"
OTHER_DTYPE = "#8B95A3"
ZONES: Mapping[str, str] = MappingProxyType(
    {
        "lost": "#0072B2",
        "subnormal": "#56B4E9",
        "normal": "#009E73",
        "overflow": "#E69F00",
        "zero": ZERO,
        "nonfinite": NONFINITE,
    }
)
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "#66707F",
        "tf32": "#8C6A4A",
        "bf16": "#9E9100",
        "fp16": "#CC79A7",
        "e4m3": "#7D4FBF",
        "e5m2": "#B48AE8",
    }
)


def of_dtype(name: str) -> str:
    """Colour of a dtype or of a precision mode (``fp16-noscaler`` is fp16's)."""
    return DTYPES.get(name.partition("-")[0], OTHER_DTYPE)
