"""Histograms by power of two: one as bars, two as mirrored bars, many as a heat map.

Bars and cells have the colours of the format's zones. Zeros stand on the left, NaN and infinities
on the right, each apart from the axis of exponents. x is log2 of the magnitude: the bin of exponent
e covers [e, e + 1) and is drawn round e + CENTRE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ampscope.analysis.distribution import aligned, occupied_range
from ampscope.numerics.formats import NumberFormat
from ampscope.numerics.histogram import (
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    ExponentRange,
    Raw,
    exponent_range,
    zone_spans,
)
from ampscope.story.palette import NONFINITE, OUTLINE, ZERO, ZONES
from app.figures.cache import cached_figure
from app.text import for_plotly, power

HEIGHT_PX = 400
LEAST = 0.5  # the log axis starts below 1, so that a single element has a bar
DECADES = 6  # below one element in a million a bar has the least height
CENTRE = 0.49  # not 0.5, so that a hover box's %{x:.0f} rounds to the exponent
LABEL_SIZE, NAME_SIZE = 13, 12  # names of modules need the width
MIN_LABEL_SHARE = 0.06  # a zone narrower than this has no room for its name
BAND_PX = (4, 12)  # of the zone band above the plot
TOP_PX = 92  # margin that the band and the lines of text above it need
LIMIT_LABEL_PX, MAX_LABEL_PX = 57, 74  # the highest lines: side by side they cross on a phone
# Neighbouring zones on two lines, so that their names stay apart in a narrow chart.
ZONE_LABEL_PX = {"lost": 21, "subnormal": 38, "normal": 21, "overflow": 38}
Part = dict[str, object]  # of a Plotly layout
# log10 of the share: from one element in a million, as which anything rarer is drawn, to all.
WEAKEST, STRONGEST = -6.0, 0.0
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
ZERO_DOMAIN, MAIN_DOMAIN, SPECIAL_DOMAIN = (0.0, 0.035), (0.045, 0.86), (0.875, 1.0)
SPECIALS = (("NaN", NAN), ("+Inf", POS_INF), ("−Inf", NEG_INF))
BOTTOM_PX, ROW_PX, MIN_PLOT_PX = 64 + SHARE_BAR_PX, 18, 150
LABEL_PX = 15  # height of a text
_HOVER = "<b>%{y}</b><br>%{customdata:,} elements, %{text:.3g} %<br>"
_INT32_MAX = 2**31 - 1  # Plotly's typed arrays have no 64-bit integers


@cached_figure
def exponent_bars(row: Raw, fmt: NumberFormat, shift: int, *, x_title: str) -> go.Figure:
    """One raw row, moved by ``shift`` powers of two; elements on a log axis."""
    shown = exponent_range(occupied_range(row[None, :], [shift]), fmt)
    counts = aligned(row[None, :], [shift], shown.lowest, shown.highest)[0]
    total = max(int(row.sum()), 1)
    bars = []
    for zone, first, end in zone_spans(fmt, shown):
        part = counts[first - shown.lowest : end - shown.lowest]
        exponents = np.arange(first, end)
        labels = [power(e) for e in exponents.tolist()]
        bars.append(_bars(zone, exponents + 0.5, part, total, ZONES[zone], "x2", labels))
    zeros, names = np.array([row[POS_ZERO], row[NEG_ZERO]]), ["+0", "−0"]
    bars.append(_bars("zero", names, zeros, total, ZERO, "x", names))
    special, names = row[[NAN, POS_INF, NEG_INF]], ["NaN", "+Inf", "−Inf"]
    bars.append(_bars("not finite", names, special, total, NONFINITE, "x3", names))
    axis = exponent_axis(fmt, shown, "x2", x_title)
    return go.Figure(bars, _bars_layout(axis, max(int(row.max()), 1)))


@cached_figure
def mirrored_bars(
    rows: Raw, fmt: NumberFormat, shifts: tuple[int, int], names: tuple[str, str], *, x_title: str
) -> go.Figure:
    """Two raw rows, each moved by its own shift: the first upwards, the second downwards. Bars are
    shares of a row's elements on a log axis, as the two may hold different numbers of them."""
    shown = exponent_range(occupied_range(rows, shifts), fmt)
    counts = aligned(rows, shifts, shown.lowest, shown.highest)
    bars = []
    for which, (sign, name) in enumerate(zip((1, -1), names, strict=True)):
        row, total = rows[which], max(int(rows[which].sum()), 1)
        parts: list[
            tuple[str, Any, Raw, str, str, list[str]]
        ] = []  # zone, x, counts, colour, axis, labels
        for zone, first, end in zone_spans(fmt, shown):
            part = counts[which, first - shown.lowest : end - shown.lowest]
            labels = [power(e) for e in range(first, end)]
            parts.append((zone, np.arange(first, end) + 0.5, part, ZONES[zone], "x2", labels))
        zeros = np.array([row[POS_ZERO] + row[NEG_ZERO]])
        parts.append(("zero", ["0"], zeros, ZERO, "x", ["0"]))
        bad = np.array([row[NAN], row[POS_INF] + row[NEG_INF]])
        parts.append(("not finite", ["NaN", "Inf"], bad, NONFINITE, "x3", ["NaN", "Inf"]))
        for zone, x, part, color, axis, labels in parts:
            bar = _bars(zone, x, part, total, color, axis, labels)
            with np.errstate(divide="ignore"):
                height = np.maximum(np.log10(part / total) + DECADES, LEAST)
            bar.y = np.where(part > 0, sign * height, np.nan)
            bar.hovertext = [f"{for_plotly(name)}<br>{text}" for text in bar.hovertext]
            bars.append(bar)
    layout = _bars_layout(exponent_axis(fmt, shown, "x2", x_title), 1)
    heights = range(-DECADES, DECADES + 1)
    layout["yaxis"] = {
        "title": {"text": "share of elements (log)"},
        "range": [-DECADES - 0.3, DECADES + 0.3],
        "tickvals": list(heights),
        "ticktext": [
            "1" if abs(h) == DECADES else f"10<sup>−{DECADES - abs(h)}</sup>" for h in heights
        ],
        "zeroline": True,
    }
    layout["barmode"] = "relative"
    layout["height"] = HEIGHT_PX + 120
    figure = go.Figure(bars, layout)
    for y, name in ((0.98, names[0]), (0.02, names[1])):
        figure.add_annotation(
            x=0.995,
            xref="paper",
            xanchor="right",
            y=y,
            yref="paper",
            text=f"<b>{for_plotly(name)}</b>",
            showarrow=False,
        )
    return figure


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


def _bars_layout(exponents: ExponentAxis, largest: int) -> Part:
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
    """One row per module (or step), one column per power of two; zones and limits are those of
    ``fmt``. The opacity of a cell is the share of the row's elements on a log scale, so that one
    element in a million is seen; NaN and infinities have full opacity however few they are."""
    shown = exponent_range(occupied_range(data.rows, data.shifts), fmt)
    counts = aligned(data.rows, data.shifts, shown.lowest, shown.highest)
    names = [for_plotly(name) for name in data.names]
    totals = np.maximum(data.rows.sum(axis=1, keepdims=True), 1)
    traces = []
    for zone, first, end in zone_spans(fmt, shown):
        part = counts[:, first - shown.lowest : end - shown.lowest]
        if part.any():
            hover = f"{_HOVER}magnitude from 2<sup>%{{x:.0f}}</sup> on: {zone}<extra></extra>"
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
            "automargin": True,  # on a phone the names below stand upright
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


def exponent_axis(fmt: NumberFormat, shown: ExponentRange, ref: str, title: str) -> ExponentAxis:
    """Axis ``ref`` (``"x2"``) with the format's limits as labelled lines, and its zones as a
    coloured band above the plot. Parts of a layout and not changes of
    a figure, because Plotly takes 5 ms for each shape that is added to one."""
    spans = [span for span in zone_spans(fmt, shown) if span[2] > span[1]]
    limits = _limits(fmt)
    wide = [s for s in spans if (s[2] - s[1]) / shown.width >= MIN_LABEL_SHARE]
    return ExponentAxis(
        axis={
            "title": {"text": title},
            "range": [shown.lowest, shown.highest + 1],
            "tickprefix": "2<sup>",
            "ticksuffix": "</sup>",
            "tickangle": 0,
            "tickfont": {"size": LABEL_SIZE},
            "showgrid": False,
            "zeroline": False,
        },
        shapes=[
            *(_limit_line(ref, x) for x, *_ in limits),
            *(_zone_band(ref, *span) for span in spans),
        ],
        annotations=[
            *(_label(ref, *limit) for limit in limits),
            *(
                _label(ref, (first + end) / 2, ZONE_LABEL_PX[zone], f"<b>{zone}</b>", "center")
                for zone, first, end in wide
            ),
        ],
    )


@dataclass(frozen=True, slots=True)
class ExponentAxis:
    """Parts of a layout that belong to one axis of exponents."""

    axis: Part
    shapes: list[Part]
    annotations: list[Part]


def _limits(fmt: NumberFormat) -> tuple[tuple[float, int, str, str], ...]:
    """(place, height, text, side of the line that the text keeps to)."""
    subnormal, normal = fmt.min_subnormal_exponent, fmt.min_normal_exponent
    largest = f"{fmt.max:,.0f}" if fmt.max < 1e6 else f"{fmt.max:.1e}"
    return (
        (subnormal, LIMIT_LABEL_PX, f"min subnormal {power(subnormal)} ", "right"),
        (normal, LIMIT_LABEL_PX, f" min normal {power(normal)}", "left"),
        (math.log2(fmt.max), MAX_LABEL_PX, f"max {largest} ", "right"),
    )


def _limit_line(ref: str, x: float) -> Part:
    line = {"color": OUTLINE, "width": 1.5, "dash": "dash"}
    place = {"x0": x, "x1": x, "y0": 0, "y1": 1}
    return {"type": "line", "xref": ref, "yref": "paper", "line": line, **place}


def _zone_band(ref: str, zone: str, first: int, end: int) -> Part:
    return {
        "type": "rect",
        "xref": ref,
        "yref": "paper",
        "x0": first,
        "x1": end,
        "ysizemode": "pixel",
        "yanchor": 1,
        "y0": BAND_PX[0],
        "y1": BAND_PX[1],
        "fillcolor": ZONES[zone],
        "line": {"color": OUTLINE, "width": 0.5},
    }


def _label(ref: str, x: float, height_px: int, text: str, side: str) -> Part:
    return {
        "xref": ref,
        "yref": "paper",
        "x": x,
        "y": 1,
        "yshift": height_px,
        "text": text,
        "showarrow": False,
        "xanchor": side,
        "yanchor": "middle",
        "font": {"size": LABEL_SIZE},
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
