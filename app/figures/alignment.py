"""Rates at 8n + {0, 1, 2, 4}: a panel a dimension; full marks at multiples of 8, hollow beside."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.hardware.alignment_costs import DIMENSIONS, STEP, position
from ampscope.hardware.bench_view import rate_words
from ampscope.hardware.ceilings import LABELS
from ampscope.records import Rate
from app.palette import dtype_color

HEIGHT, COLUMNS = 560, 2
DASHES = {"": "solid", "NCHW": "dot", "channels_last": "solid"}


def alignment_figure(rates: Sequence[Rate]) -> go.Figure:
    """From zero upwards, so that a small cost looks small."""
    done = [r for r in rates if r.series in DIMENSIONS and r.timing is not None]
    shown = [series for series in DIMENSIONS if any(r.series == series for r in done)]
    rows = max(1, -(-len(shown) // COLUMNS))
    figure = make_subplots(
        rows=rows,
        cols=COLUMNS,
        subplot_titles=[_title(series, done) for series in shown],
        vertical_spacing=0.16,
        horizontal_spacing=0.08,
    )
    named: set[str] = set()
    for place, series in enumerate(shown):
        row, column = divmod(place, COLUMNS)
        for trace in _traces([r for r in done if r.series == series], named):
            figure.add_trace(trace, row=row + 1, col=column + 1)
        even = sorted({position(r) for r in done if r.series == series and _is_even(r)})
        figure.update_xaxes(tickvals=even, showgrid=True, row=row + 1, col=column + 1)
    figure.update_yaxes(rangemode="tozero", exponentformat="SI", title="operations a second")
    figure.update_layout(
        height=HEIGHT if rows > 1 else HEIGHT // 2 + 40,
        margin={"t": 64, "b": 0, "l": 0, "r": 8},
        legend={"orientation": "h", "y": 1.06, "yanchor": "bottom", "x": 0},
        uirevision="alignment",
    )
    return figure


def _traces(rates: Sequence[Rate], named: set[str]) -> list[go.Scatter]:
    groups = dict.fromkeys((r.dtype, r.layout) for r in rates)
    return [
        _trace([r for r in rates if (r.dtype, r.layout) == group], *group, named=named)
        for group in groups
    ]


def _trace(rates: Sequence[Rate], dtype: str, layout: str, *, named: set[str]) -> go.Scatter:
    name = f"{LABELS[dtype]}{', ' + layout if layout else ''}"
    is_new = name not in named
    named.add(name)
    points = sorted(rates, key=position)
    color = dtype_color(dtype)
    return go.Scatter(
        name=name,
        legendgroup=name,
        showlegend=is_new,
        x=[position(p) for p in points],
        y=[p.flops_s for p in points],
        mode="lines+markers",
        line={"color": color, "width": 1.5, "dash": DASHES[layout]},
        marker={
            "size": 8,
            "symbol": ["circle" if _is_even(p) else "circle-open" for p in points],
            "color": color,
        },
        hovertext=[
            f"<b>{position(p):,}</b>, {name}<br>{rate_words(p.flops_s)}, quartiles "
            f"{p.timing.spread if p.timing else 0:.0%} apart"
            for p in points
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _title(series: str, rates: Sequence[Rate]) -> str:
    shape = next(r.shape for r in rates if r.series == series)
    if series == "align_channels":
        batch, _, height, width, filters = shape
        return f"channels of a 3 × 3 convolution ({batch} × {height} × {width}, {filters} filters)"
    name = DIMENSIONS[series]
    others = [n for n in ("M", "N", "K") if n != name]
    fixed = next(size for axis, size in zip("MNK", shape, strict=True) if axis == others[0])
    return f"{name} of a product ({' = '.join(others)} = {fixed:,})"


def _is_even(rate: Rate) -> bool:
    return position(rate) % STEP == 0
