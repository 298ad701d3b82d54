"""Samples a second against the batch size: a line a precision, dotted where it did not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.compare.batches import BatchSearch
from app.palette import OUTLINE, dtype_color
from app.text import for_plotly

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star")


def throughput(searches: Sequence[BatchSearch]) -> go.Figure:
    """Both axes are logarithmic: a line that bends flat has no use for a larger batch."""
    figure = go.Figure()
    for place, search in enumerate(searches):
        _add(figure, search, SYMBOLS[place % len(SYMBOLS)])
    figure.update_layout(
        height=360,
        margin={"t": 40, "b": 50, "l": 10, "r": 10},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        xaxis={"title": "samples a step", "type": "log", "dtick": "D2"},
        yaxis={"title": "samples a second", "type": "log", "dtick": "D2"},
    )
    return figure


def _add(figure: go.Figure, search: BatchSearch, symbol: str) -> None:
    timed = [(t, t.step) for t in search.tries if t.step is not None]
    color = dtype_color(search.precision)
    figure.add_trace(
        go.Scatter(
            x=[t.samples for t, _ in timed],
            y=[t.samples_s for t, _ in timed],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [t.samples / s.low_s - t.samples / s.median_s for t, s in timed],
                "arrayminus": [t.samples / s.median_s - t.samples / s.high_s for t, s in timed],
                "color": OUTLINE,
                "thickness": 1,
            },
            mode="lines+markers",
            line={"color": color, "width": 2},
            marker={"symbol": symbol, "size": 8},
            name=for_plotly(search.precision),
            hovertemplate=f"{for_plotly(search.precision)}, %{{x:,}} samples: %{{y:,.4g}} a second"
            "<extra></extra>",
        )
    )
    knee, largest = search.knee, search.largest
    if knee is not None:
        figure.add_annotation(
            x=_log(knee.samples), y=_log(knee.samples_s or 1), text="knee", showarrow=True, ay=-34,
            arrowcolor=color,
        )  # fmt: skip
    if largest is not None and largest.too_many:
        figure.add_vline(x=largest.too_many, line={"color": color, "dash": "dot", "width": 2})


def _log(value: float) -> float:
    """Annotations on a logarithmic axis stand at the exponent."""
    return math.log10(value)
