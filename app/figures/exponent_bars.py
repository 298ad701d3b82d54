"""One histogram as bars: exponent on x, elements on a log axis, bars in the colours of the zones.

Zeros have a bar of their own on the left, NaN and infinities on the right.
"""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from ampscope.analysis.distribution import aligned, occupied_range
from ampscope.analysis.exponent_zones import exponent_range, zone_spans
from ampscope.exponents import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, Raw
from ampscope.formats import NumberFormat
from app.figures.exponent_axis import (
    TOP_PX,
    ExponentAxis,
    Part,
    exponent_axis,
)
from app.figures.kept import kept
from app.palette import NONFINITE, OUTLINE, ZERO, ZONES

HEIGHT_PX = 400
LEAST = 0.5  # the log axis starts below 1, so that a single element has a bar


@kept
def exponent_bars(row: Raw, fmt: NumberFormat, shift: int, *, x_title: str) -> go.Figure:
    """Figure of one raw row, moved by ``shift`` powers of two."""
    shown = exponent_range(occupied_range(row[None, :], [shift]), fmt)
    counts = aligned(row[None, :], [shift], shown.lowest, shown.highest)[0]
    total = max(int(row.sum()), 1)
    bars = []
    for zone, first, end in zone_spans(fmt, shown):
        part = counts[first - shown.lowest : end - shown.lowest]
        exponents = np.arange(first, end)
        labels = [f"2^{e}" for e in exponents]
        bars.append(_bars(zone, exponents + 0.5, part, total, ZONES[zone], "x2", labels))
    zeros, names = np.array([row[POS_ZERO], row[NEG_ZERO]]), ["+0", "−0"]
    bars.append(_bars("zero", names, zeros, total, ZERO, "x", names))
    special, names = row[[NAN, POS_INF, NEG_INF]], ["NaN", "+Inf", "−Inf"]
    bars.append(_bars("not finite", names, special, total, NONFINITE, "x3", names))
    axis = exponent_axis(fmt, shown, "x2", x_title)
    return go.Figure(bars, _layout(axis, max(int(row.max()), 1)))


def _bars(
    zone: str,
    x: object,
    counts: Raw,
    total: int,
    color: str,
    axis: str,
    labels: list[str],
) -> go.Bar:
    hover = [
        f"<b>{label}</b><br>{n:,} of {total:,}, {100 * n / total:.3g} %<br>{zone}"
        for label, n in zip(labels, counts.tolist(), strict=True)
    ]
    return go.Bar(
        name=zone,
        x=x,
        y=np.where(counts > 0, counts, np.nan),
        xaxis=axis,
        marker={"color": color, "line": {"color": OUTLINE, "width": 0.5}},
        hovertext=hover,
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
    )


def _layout(exponents: ExponentAxis, largest: int) -> Part:
    return {
        "shapes": exponents.shapes,
        "annotations": exponents.annotations,
        "height": HEIGHT_PX,
        "margin": {"t": TOP_PX, "b": 64, "l": 10, "r": 24},
        "plot_bgcolor": "rgba(0,0,0,0)",
        "bargap": 0.06,
        "xaxis": {"domain": (0.0, 0.07), "title": {"text": "zero"}, "type": "category"},
        "xaxis2": {**exponents.axis, "domain": (0.09, 0.85), "anchor": "y"},
        "xaxis3": {"domain": (0.87, 1.0), "title": {"text": "not finite"}, "type": "category"},
        "yaxis": {
            "title": {"text": "elements (log)"},
            "type": "log",
            "range": [float(np.log10(LEAST)), float(np.log10(largest)) + 0.15],
            "dtick": 1,
        },
    }
