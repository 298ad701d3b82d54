"""Heat map of histograms: one row a module (or a step), one column a power of two.

The hue of a cell is its column's zone, its strength the share of the row's elements on a log scale,
so that one element in a million is seen. Zeros stand in a column of their own on the left; NaN and
infinities in columns on the right, at full strength however few they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ampscope.analysis.distribution import aligned, occupied_range
from ampscope.analysis.exponent_zones import exponent_range, zone_spans
from ampscope.exponents import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, Raw
from ampscope.formats import NumberFormat
from app.figures.exponent_axis import (
    CENTRE,
    LABEL_SIZE,
    NAME_SIZE,
    TOP_PX,
    ExponentAxis,
    Part,
    exponent_axis,
)
from app.figures.strength import SHARE_BAR, SHARE_BAR_PX, STRONGEST, WEAKEST, fade, log_share
from app.palette import NONFINITE, OUTLINE, ZERO, ZONES
from app.text import for_plotly

ZERO_DOMAIN, MAIN_DOMAIN, SPECIAL_DOMAIN = (0.0, 0.035), (0.045, 0.86), (0.875, 1.0)
SPECIALS = (("NaN", NAN), ("+Inf", POS_INF), ("−Inf", NEG_INF))
BOTTOM_PX, ROW_PX, MIN_PLOT_PX = 64 + SHARE_BAR_PX, 18, 150
LABEL_PX = 15  # height of a text
_HOVER = "<b>%{y}</b><br>%{customdata:,} elements, %{text:.3g} %<br>"
_INT32_MAX = 2**31 - 1  # Plotly's typed arrays have no 64-bit integers


@dataclass(frozen=True, slots=True)
class MapRows:
    """What to draw, from top to bottom: counts, what each row is called, and how far it moves."""

    rows: Raw  # [n, RAW_LEN]
    ticks: Sequence[str]  # short, for the axis
    names: Sequence[str]  # whole and distinct, for the hover box
    shifts: Sequence[int]


def exponent_map(
    data: MapRows, fmt: NumberFormat, *, x_title: str, y_title: str, row_px: float = ROW_PX
) -> go.Figure:
    """Figure of ``data``; zones and limits are those of ``fmt``."""
    shown = exponent_range(occupied_range(data.rows, data.shifts), fmt)
    counts = aligned(data.rows, data.shifts, shown.lowest, shown.highest)
    names = [for_plotly(name) for name in data.names]
    totals = np.maximum(data.rows.sum(axis=1, keepdims=True), 1)
    traces = []
    for zone, first, end in zone_spans(fmt, shown):
        part = counts[:, first - shown.lowest : end - shown.lowest]
        if part.any():
            hover = f"{_HOVER}magnitude from 2^%{{x:.0f}} on: {zone}<extra></extra>"
            x = [e + CENTRE for e in range(first, end)]
            look = {"xaxis": "x2", "showscale": False}
            traces.append(_cells(part, totals, names, x, ZONES[zone], hover, look))
    zeros = data.rows[:, [POS_ZERO]] + data.rows[:, [NEG_ZERO]]
    hover, look = f"{_HOVER}exactly zero<extra></extra>", {"colorbar": SHARE_BAR}
    traces.append(_cells(zeros, totals, names, ["0"], ZERO, hover, look))  # grey stands for all
    traces.append(_special_cells(data.rows, totals, names, row_px >= LABEL_PX))
    exponents = exponent_axis(fmt, shown, "x2", x_title)
    is_empty = not data.rows[:, NAN : NEG_INF + 1].any()
    return go.Figure(traces, _layout(exponents, data.ticks, names, y_title, row_px, is_empty))


def _cells(
    counts: Raw,
    totals: Raw,
    names: list[str],
    x: Sequence[object],
    color: str,
    hover: str,
    look: Part,
) -> go.Heatmap:
    """Cells of one zone; none where nothing was counted."""
    return go.Heatmap(
        z=log_share(counts, totals),
        x=x,
        y=names,
        zmin=WEAKEST,
        zmax=STRONGEST,
        colorscale=fade(color),
        customdata=_exact(counts),
        text=(100 * counts / totals).astype(np.float32),
        hovertemplate=hover,
        hoverongaps=False,
        **look,
    )


def _special_cells(rows: Raw, totals: Raw, names: list[str], labelled: bool) -> go.Heatmap:
    counts = rows[:, [column for _, column in SPECIALS]]
    labels = [[_short(n) if n else "" for n in row] for row in counts.tolist()]
    return go.Heatmap(
        z=np.where(counts > 0, 1.0, np.nan),
        x=[name for name, _ in SPECIALS],
        y=names,
        xaxis="x3",
        zmin=0,
        zmax=1,
        colorscale=[[0, NONFINITE], [1, NONFINITE]],
        showscale=False,
        text=labels,
        texttemplate="%{text}" if labelled else None,
        textfont={"color": "#000000"},
        customdata=_exact(counts),
        hovertemplate="<b>%{y}</b><br>%{customdata:,} elements<br>%{x}<extra></extra>",
        hoverongaps=False,
    )


def _exact(counts: Raw) -> NDArray[np.int32] | NDArray[np.float64]:
    """As 32-bit integers, or as floats that hold each count below 2^53 exactly."""
    fits = not counts.size or counts.max() <= _INT32_MAX
    return counts.astype(np.int32) if fits else counts.astype(np.float64)


def _short(count: int) -> str:
    """A count that fits into a cell: 950, 12k, 3M."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _layout(
    exponents: ExponentAxis,
    ticks: Sequence[str],
    names: list[str],
    y_title: str,
    row_px: float,
    is_empty: bool,
) -> Part:
    """The exponent axis's parts, with the columns of zeros and of NaN and infinities beside it. The
    latter are outlined, and say so when there are none."""
    n, every = len(names), max(1, math.ceil(LABEL_PX / row_px))
    beside = {"xref": "x3 domain", "yref": "paper", "font": {"size": LABEL_SIZE}}
    none = {"x": 0.5, "y": 0.5, "text": "none", "showarrow": False, **beside}
    outline: Part = {"type": "rect", "x0": 0, "x1": 1, "y0": 0, "y1": 1}
    outline |= {"xref": "x3 domain", "yref": "paper", "line": {"color": OUTLINE, "width": 1}}
    return {
        "shapes": [*exponents.shapes, outline],
        "annotations": [*exponents.annotations, *([none] if is_empty else [])],
        "height": max(MIN_PLOT_PX, round(row_px * n)) + TOP_PX + BOTTOM_PX,
        "margin": {"t": TOP_PX, "b": BOTTOM_PX, "l": 10, "r": 24},
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {"domain": ZERO_DOMAIN, "type": "category", "showgrid": False},
        "xaxis2": {**exponents.axis, "domain": MAIN_DOMAIN, "anchor": "y"},
        "xaxis3": {
            "domain": SPECIAL_DOMAIN,
            "anchor": "y",
            "title": {"text": "not finite"},
            "type": "category",
            "range": [-0.5, len(SPECIALS) - 0.5],
            "tickvals": list(range(len(SPECIALS))),
            "ticktext": [name for name, _ in SPECIALS],
            "showgrid": False,
        },
        "yaxis": {
            "title": {"text": y_title},
            "type": "category",
            "range": [n - 0.5, -0.5],
            "tickvals": names[::every],
            "ticktext": [for_plotly(tick) for tick in ticks[::every]],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
            "tickfont": {"size": NAME_SIZE},
        },
    }
