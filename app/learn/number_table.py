"""What each format makes of a number: to nearest, by truncation, its bits."""

from __future__ import annotations

import math
from fractions import Fraction

import pandas as pd

from ampscope.formats import FORMATS
from ampscope.rounding import encode, exact, nearest, toward_zero, width

NAMES = ("fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2")


def table(text: str, *, saturates: bool) -> pd.DataFrame:
    """What each format makes of a number, both ways."""
    rows = []
    for name in NAMES:
        fmt = FORMATS[name]
        near, cut = nearest(text, fmt, saturates=saturates), toward_zero(text, fmt)
        rows.append(
            {
                "format": name,
                "to nearest": _digits(near),
                "error": _error(text, near),
                "by truncation": _digits(cut),
                "error then": _error(text, cut),
                "bits": f"{encode(near, fmt):0{width(fmt)}b}",
                "largest": f"{fmt.max:,.0f}" if fmt.max < 1e6 else f"{fmt.max:.4g}",
                "smallest": f"{fmt.min_subnormal:.2g}",
            }
        )
    return pd.DataFrame(rows)


def spread_words(made: pd.DataFrame) -> str:
    """Which formats keep the number, computed from the table."""
    kept = [r["format"] for _, r in made.iterrows() if r["error"] == "exact"]
    if len(kept) == len(made):
        return "Every format holds this number exactly."
    if not kept:
        return "No format holds this number exactly: each keeps the nearest that it has."
    return f"Exact in {', '.join(kept)}; the others keep the nearest that they have."


def _digits(value: float) -> str:
    return f"{value:.9g}" if math.isfinite(value) else {math.inf: "Inf", -math.inf: "-Inf"}.get(
        value, "NaN"
    )  # fmt: skip


def _error(text: str, value: float) -> str:
    number = exact(text)
    if isinstance(number, float):
        return "exact" if number == value or (number != number and value != value) else "no figure"
    if not math.isfinite(value):
        return "all of it"
    if number == value:
        return "exact"
    share = float(abs(Fraction(value) - number) / abs(number))
    return f"{share:.2%}" if share > 1e-4 else f"{share:.1e}"
