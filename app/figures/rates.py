"""What each dtype reaches at each size: a line a dtype, its quartiles, and the vendor's peaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from ampscope.hardware.bench_view import rate_words
from ampscope.hardware.ceilings import LABELS, SERIES, WIDTHS
from ampscope.hardware.vendor_figures import VendorFigures
from ampscope.records import Rate
from app.palette import dtype_color

HEIGHT = 420
# fp64 and int8 share the colour of dtypes without one of their own; the symbol tells all apart.
SYMBOLS = {
    "fp64": "square",
    "fp32": "circle",
    "tf32": "diamond",
    "bf16": "triangle-up",
    "fp16": "triangle-down",
    "int8": "square-open",
    "e4m3": "star",
}


def rates_figure(rates: Sequence[Rate], vendor: VendorFigures | None) -> go.Figure:
    """Both axes logarithmic: rates lie two decades apart."""
    figure = go.Figure()
    ceilings = [r for r in rates if r.series == SERIES and r.timing is not None]
    dtypes = [d for d in WIDTHS if any(r.dtype == d for r in ceilings)]
    for dtype in dtypes:
        points = sorted((r for r in ceilings if r.dtype == dtype), key=lambda r: r.shape)
        figure.add_trace(_line(dtype, points))
    sizes = sorted({r.shape[0] for r in ceilings})
    if vendor is not None and sizes:
        figure.add_traces(_peaks(vendor, dtypes, (sizes[0], sizes[-1])))
    figure.update_layout(
        height=HEIGHT,
        margin={"t": 32, "b": 0, "l": 0, "r": 8},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        uirevision="rates",  # a new size must not undo a person's zoom
    )
    figure.update_xaxes(
        type="log",
        title="size of the product (m = n = k)",
        tickvals=sizes,
        ticktext=[f"{size:,}" for size in sizes],
        showgrid=False,
    )
    figure.update_yaxes(type="log", title="operations a second", exponentformat="SI", dtick=1)
    return figure


def _line(dtype: str, points: Sequence[Rate]) -> go.Scatter:
    label = LABELS[dtype]
    medians = [p.flops_s or 0.0 for p in points]
    timings = [p.timing for p in points if p.timing is not None]
    highs = [p.flops / t.low_s for p, t in zip(points, timings, strict=True)]
    lows = [p.flops / t.high_s for p, t in zip(points, timings, strict=True)]
    return go.Scatter(
        name=label,
        x=[p.shape[0] for p in points],
        y=medians,
        error_y=_bars(medians, lows, highs),
        mode="lines+markers",
        line={"color": dtype_color(dtype), "width": 2},
        marker={"symbol": SYMBOLS[dtype], "size": 9},
        hovertext=[
            f"<b>{label}, {p.shape[0]:,}</b><br>{rate_words(p.flops_s)}, quartiles "
            f"{rate_words(low)} to {rate_words(high)}<br>{t.repeats} times"
            for p, t, low, high in zip(points, timings, lows, highs, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _bars(
    medians: Sequence[float], lows: Sequence[float], highs: Sequence[float]
) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - m for m, high in zip(medians, highs, strict=True)],
        "arrayminus": [m - low for m, low in zip(medians, lows, strict=True)],
        "thickness": 1.5,
        "width": 4,
    }


def _peaks(vendor: VendorFigures, dtypes: Sequence[str], ends: tuple[int, int]) -> list[go.Scatter]:
    """One dotted line a figure, named by all dtypes that share it."""
    same: dict[float, list[str]] = defaultdict(list)
    for dtype in dtypes:
        if dtype in vendor.flops_s:
            same[vendor.flops_s[dtype]].append(dtype)
    return [
        go.Scatter(
            x=list(ends),
            y=[figure, figure],
            mode="lines+text",
            text=[f"vendor: {', '.join(LABELS[n] for n in names)}", ""],
            textposition="top right",
            line={"color": dtype_color(names[0]), "width": 1.5, "dash": "dot"},
            hovertemplate=f"vendor: {rate_words(figure)}<extra></extra>",
            showlegend=False,
        )
        for figure, names in same.items()
    ]
