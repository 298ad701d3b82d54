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
from ampscope.analysis.distribution import aligned, occupied_range
from ampscope.exponents import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, Raw
from ampscope.formats import NumberFormat
from numpy.typing import NDArray

from app.figures.exponent_axis import ExponentRange, exponent_range, set_exponent_axis, zone_spans
from app.palette import NONFINITE, OUTLINE, ZERO, ZONES
from app.text import for_plotly

FAINTEST = -6.0  # log10 of the share with the faintest colour; smaller ones look the same
ZERO_DOMAIN, MAIN_DOMAIN, SPECIAL_DOMAIN = (0.0, 0.035), (0.045, 0.885), (0.9, 1.0)
SPECIALS = (("NaN", NAN), ("+Inf", POS_INF), ("−Inf", NEG_INF))
TOP, BOTTOM, ROW_PX, MIN_PLOT_PX = 74, 64, 18, 150
LABEL_PX = 15  # height of a tick's text


@dataclass(frozen=True, slots=True)
class MapRows:
    """What to draw, from top to bottom: counts, what each row is called, and how far it moves."""

    rows: Raw  # [n, RAW_LEN]
    ticks: Sequence[str]  # short, for the axis
    names: Sequence[str]  # whole, for the hover box
    shifts: Sequence[int]


def exponent_map(
    data: MapRows, fmt: NumberFormat, *, x_title: str, y_title: str, row_px: float = ROW_PX
) -> go.Figure:
    """Figure of ``data``; zones and limits are those of ``fmt``."""
    shown = exponent_range(_range_after_shift(data), fmt)
    figure = go.Figure()
    totals = np.maximum(data.rows.sum(axis=1, keepdims=True), 1)
    counts = aligned(data.rows, data.shifts, shown.lowest, shown.highest)
    for zone, first, end in zone_spans(fmt, shown):
        _add_zone(figure, data, zone, counts, totals, shown, first, end)
    zeros = data.rows[:, [POS_ZERO]] + data.rows[:, [NEG_ZERO]]
    _add_zeros(figure, data, zeros, totals)
    _add_specials(figure, data)
    _lay_out(figure, data, y_title, row_px)
    set_exponent_axis(figure, fmt, shown, "x2", x_title)
    return figure


def _range_after_shift(data: MapRows) -> tuple[int, int] | None:
    ends = []
    for shift in set(data.shifts):
        found = occupied_range(data.rows[np.asarray(data.shifts) == shift])
        if found is not None:
            ends.append((found[0] + shift, found[1] + shift))
    return None if not ends else (min(e[0] for e in ends), max(e[1] for e in ends))


def _add_zone(
    figure: go.Figure,
    data: MapRows,
    zone: str,
    counts: Raw,
    totals: Raw,
    shown: ExponentRange,
    first: int,
    end: int,
) -> None:
    part = counts[:, first - shown.lowest : end - shown.lowest]
    if not part.any():
        return
    figure.add_trace(
        go.Heatmap(
            z=_strength(part, totals),
            x=np.arange(first, end) + 0.5,
            y=np.arange(len(part)),
            xaxis="x2",
            zmin=FAINTEST,
            zmax=0,
            colorscale=_fade(ZONES[zone]),
            showscale=False,
            hovertext=_texts(data.names, totals, part, np.arange(first, end)),
            hovertemplate=f"%{{hovertext}}<br>{zone}<extra></extra>",
            hoverongaps=False,
        )
    )


def _add_zeros(figure: go.Figure, data: MapRows, zeros: Raw, totals: Raw) -> None:
    """Also carries the colour bar: its grey stands for the strength of every hue."""
    figure.add_trace(
        go.Heatmap(
            z=_strength(zeros, totals),
            x=[0],
            y=np.arange(len(zeros)),
            zmin=FAINTEST,
            zmax=0,
            colorscale=_fade(ZERO),
            hovertext=_texts(data.names, totals, zeros, None),
            hovertemplate="%{hovertext}<br>zero<extra></extra>",
            hoverongaps=False,
            colorbar={
                "title": {"text": "share of<br>elements"},
                "tickvals": [0, -2, -4, -6],
                "ticktext": ["100 %", "1 %", "0.01 %", "≤ 1 ppm"],
                "thickness": 10,
                "outlinewidth": 0.5,
                "outlinecolor": OUTLINE,
                "len": 1.0,
            },
        )
    )


def _add_specials(figure: go.Figure, data: MapRows) -> None:
    counts = data.rows[:, [column for _, column in SPECIALS]]
    known = np.where(counts > 0, 1.0, np.nan)
    labels = [[_short(n) if n else "" for n in row] for row in counts.tolist()]
    figure.add_trace(
        go.Heatmap(
            z=known,
            x=[name for name, _ in SPECIALS],
            y=np.arange(len(counts)),
            xaxis="x3",
            zmin=0,
            zmax=1,
            colorscale=[[0, NONFINITE], [1, NONFINITE]],
            showscale=False,
            text=labels,
            texttemplate="%{text}",
            textfont={"size": 11, "color": "#12161C"},
            hovertext=_texts(data.names, data.rows.sum(axis=1, keepdims=True), counts, None),
            hovertemplate="%{hovertext}<br>%{x}<extra></extra>",
            hoverongaps=False,
        )
    )


def _strength(counts: Raw, totals: Raw) -> NDArray[np.float32]:
    """log10 of the share; NaN (no cell) where there is nothing."""
    out = np.full(counts.shape, np.nan)
    np.log10(counts / totals, out=out, where=counts > 0)
    return out.astype(np.float32)


def _texts(
    names: Sequence[str], totals: Raw, counts: Raw, exponents: NDArray[np.int64] | None
) -> list[list[str]]:
    """Hover texts, only where there is a cell."""
    out = []
    for name, total, row in zip(names, totals[:, 0].tolist(), counts.tolist(), strict=True):
        start, whole = f"<b>{for_plotly(name)}</b><br>", f" of {total:,}, "
        texts = []
        for column, n in enumerate(row):
            if not n:
                texts.append("")
                continue
            at = "" if exponents is None else f"magnitude 2^{exponents[column]} and up: "
            texts.append(f"{start}{at}{n:,}{whole}{100 * n / max(total, 1):.3g} %")
        out.append(texts)
    return out


def _fade(color: str) -> list[list[object]]:
    """From a quarter of the colour's strength to all of it."""
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return [[0, f"rgba({r},{g},{b},0.22)"], [1, f"rgba({r},{g},{b},1)"]]


def _short(count: int) -> str:
    """A count that fits into a cell: 950, 12k, 3M."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _lay_out(figure: go.Figure, data: MapRows, y_title: str, row_px: float) -> None:
    n = len(data.rows)
    plot_px = max(MIN_PLOT_PX, round(row_px * n))
    every = max(1, math.ceil(LABEL_PX / row_px))
    places = list(range(0, n, every))
    figure.update_layout(
        height=plot_px + TOP + BOTTOM,
        margin={"t": TOP, "b": BOTTOM, "l": 10, "r": 10},
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis={"domain": ZERO_DOMAIN, "tickvals": [0], "ticktext": ["0"], "showgrid": False},
        xaxis2={"domain": MAIN_DOMAIN, "anchor": "y"},
        xaxis3={
            "domain": SPECIAL_DOMAIN,
            "anchor": "y",
            "title": {"text": "not finite"},
            "type": "category",
            "categoryarray": [name for name, _ in SPECIALS],
            "range": [-0.5, len(SPECIALS) - 0.5],
            "showgrid": False,
        },
        yaxis={
            "title": {"text": y_title},
            "range": [n - 0.5, -0.5],
            "tickvals": places,
            "ticktext": [for_plotly(data.ticks[i]) for i in places],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
    )
