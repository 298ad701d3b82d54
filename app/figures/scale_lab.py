"""The recorded loss scale and a replayed one over the same steps, with the skips of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.records import StepRecord
from ampscope.scalers.replay import Replay
from app.palette import MEASURE, NONFINITE, OUTLINE
from app.text import power_of_two

MOST_TICKS = 8


def replayed_scales(steps: Sequence[StepRecord], made: Replay) -> go.Figure:
    """log2 of the scale; a cross is a skipped step, a hollow circle a guess."""
    figure = go.Figure()
    recorded = [(s.step, s.scale, s.skipped) for s in steps if s.scale is not None]
    replayed = [(s.step, s.scale, s.skipped) for s in made.steps]
    _add(figure, recorded, "recorded", OUTLINE, "dot")
    _add(figure, replayed, "replayed", MEASURE, "solid")
    guessed = [s for s in made.steps if s.is_guess and _drawable(s.scale)]
    if guessed:
        figure.add_trace(
            go.Scatter(
                x=[s.step for s in guessed],
                y=[math.log2(s.scale) for s in guessed],
                mode="markers",
                marker={"symbol": "circle-open", "size": 10, "color": MEASURE},
                name="guess",
                hovertemplate="step %{x}: the histogram does not tell<extra></extra>",
            )
        )
    figure.update_layout(
        height=320,
        margin={"t": 40, "b": 46, "l": 10, "r": 10},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        xaxis={"title": "step"},
        yaxis={"title": "loss scale", "tickprefix": "2^", "tickformat": ".0f", **_ticks(figure)},
    )
    return figure


def _ticks(figure: go.Figure) -> dict[str, float]:
    """Whole powers of two, however few there are."""
    drawn = [y for trace in figure.data for y in trace.y]
    if not drawn:
        return {}
    return {"dtick": max(1, math.ceil((max(drawn) - min(drawn)) / MOST_TICKS))}


def _add(
    figure: go.Figure, points: Sequence[tuple[int, float, bool]], name: str, color: str, dash: str
) -> None:
    drawn = [(step, scale, skipped) for step, scale, skipped in points if _drawable(scale)]
    figure.add_trace(
        go.Scatter(
            x=[step for step, _, _ in drawn],
            y=[math.log2(scale) for _, scale, _ in drawn],
            mode="lines",
            line={"shape": "hv", "color": color, "width": 2, "dash": dash},
            text=[power_of_two(scale) for _, scale, _ in drawn],
            name=name,
            hovertemplate=f"{name}, step %{{x}}: %{{text}}<extra></extra>",
        )
    )
    skips = [(step, scale) for step, scale, skipped in drawn if skipped]
    if skips:
        figure.add_trace(
            go.Scatter(
                x=[step for step, _ in skips],
                y=[math.log2(scale) for _, scale in skips],
                mode="markers",
                marker={"symbol": "x", "size": 8, "color": NONFINITE,
                        "line": {"color": color, "width": 1}},
                name=f"{name}, skipped",
                hovertemplate=f"{name}, step %{{x}} skipped<extra></extra>",
            )
        )  # fmt: skip


def _drawable(scale: float) -> bool:
    """Zero and Inf have no place on the axis; the table has them."""
    return 0 < scale < math.inf
