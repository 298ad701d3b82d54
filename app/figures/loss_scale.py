"""Loss scales: which of them suit each module and all of them, as bars over powers of two; the
recorded one and a replayed one over the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from ampscope.analysis.scale_window import ModuleWindow
from ampscope.records import StepRecord
from ampscope.scalers.replay import Replay
from ampscope.story.palette import LOST, MEASURE, NONFINITE, NORMAL, OUTLINE, OVERFLOW
from app.figures import ABOVE
from app.text import cut, for_plotly, power

ROW_PX, EDGE_PX = 20, 110
NAME_LENGTH = 36
MOST_TICKS = 8


def scale_windows(
    windows: Sequence[ModuleWindow], names: Mapping[int, str], scale: float | None
) -> go.Figure:
    """A bar per module, from the lowest to the highest scale; a cross where there is none between.
    The green band suits all; ``scale`` (log2) is what the step used."""
    labels = [for_plotly(cut(names.get(w.module, "?"), NAME_LENGTH)) for w in windows]
    rows = list(range(len(windows)))
    figure = go.Figure()
    held = [w.low <= w.high for w in windows]
    figure.add_bar(
        y=[r for r, ok in zip(rows, held, strict=True) if ok],
        x=[w.high - w.low for w, ok in zip(windows, held, strict=True) if ok],
        base=[w.low for w, ok in zip(windows, held, strict=True) if ok],
        orientation="h",
        marker={"color": MEASURE, "line": {"color": OUTLINE, "width": 1}},
        name="scales that suit it",
        customdata=[
            (label, w.low, w.high) for w, ok, label in zip(windows, held, labels, strict=True) if ok
        ],
        hovertemplate="%{customdata[0]}: 2<sup>%{customdata[1]}</sup> to "
        "2<sup>%{customdata[2]}</sup><extra></extra>",
    )
    broken = [(r, w, n) for r, w, n, ok in zip(rows, windows, labels, held, strict=True) if not ok]
    if broken:
        figure.add_scatter(
            y=[r for r, _, _ in broken],
            x=[(w.low + w.high) / 2 for _, w, _ in broken],
            mode="markers",
            marker={"symbol": "x", "size": 9, "color": OVERFLOW},
            name="no scale suits it",
            text=[n for _, _, n in broken],
            hovertemplate="%{text}: it spans more powers of two than the format<extra></extra>",
        )
    low, high = max(w.low for w in windows), min(w.high for w in windows)
    if low <= high:
        edge, opacity = {"color": NORMAL, "width": 3}, 0.25 if low < high else 1.0
        figure.add_vrect(x0=low, x1=high, fillcolor=NORMAL, opacity=opacity, line=edge)
    if scale is not None:
        figure.add_vline(x=scale, line={"color": LOST, "width": 2, "dash": "dash"})
    figure.update_layout(
        height=ROW_PX * len(windows) + EDGE_PX,
        margin={"t": 40, "b": 46, "l": 10, "r": 10},
        legend=ABOVE,
        xaxis={"title": "loss scale", "tickprefix": "2<sup>", "ticksuffix": "</sup>"},
        yaxis={
            "title": "module",
            "tickvals": rows,
            "ticktext": labels,
            "autorange": "reversed",
        },
    )
    return figure


def replayed_scales(steps: Sequence[StepRecord], made: Replay) -> go.Figure:
    """log2 of both scales: a cross is a skipped step, a hollow circle a guess."""
    figure = go.Figure()
    recorded = [(s.step, s.scale, s.skipped) for s in steps if s.scale is not None]
    replayed = [(s.step, s.scale, s.skipped) for s in made.steps]
    _add(figure, recorded, "recorded", OUTLINE, "dot")
    _add(figure, replayed, "replayed", MEASURE, "solid")
    guessed = [s for s in made.steps if s.is_guess and _drawable(s.scale)]
    if guessed:
        figure.add_scatter(
            x=[s.step for s in guessed],
            y=[math.log2(s.scale) for s in guessed],
            mode="markers",
            marker={"symbol": "circle-open", "size": 10, "color": MEASURE},
            name="guess",
            hovertemplate="step %{x}: not known from the histogram<extra></extra>",
        )
    figure.update_layout(
        height=320,
        margin={"t": 40, "b": 46, "l": 10, "r": 10},
        legend=ABOVE,
        xaxis={"title": "step"},
        yaxis={
            "title": "loss scale",
            "tickprefix": "2<sup>",
            "ticksuffix": "</sup>",
            "tickformat": ".0f",
            **_ticks(figure),
        },
    )
    return figure


def _add(
    figure: go.Figure, points: Sequence[tuple[int, float, bool]], name: str, color: str, dash: str
) -> None:
    drawn = [(step, scale, skipped) for step, scale, skipped in points if _drawable(scale)]
    figure.add_scatter(
        x=[step for step, _, _ in drawn],
        y=[math.log2(scale) for _, scale, _ in drawn],
        mode="lines",
        line={"shape": "hv", "color": color, "width": 2, "dash": dash},
        text=[power(math.log2(scale)) for _, scale, _ in drawn],
        name=name,
        hovertemplate=f"{name}, step %{{x}}: %{{text}}<extra></extra>",
    )
    skips = [(step, scale) for step, scale, skipped in drawn if skipped]
    if skips:
        figure.add_scatter(
                x=[step for step, _ in skips],
                y=[math.log2(scale) for _, scale in skips],
                mode="markers",
                marker={"symbol": "x", "size": 8, "color": NONFINITE,
                        "line": {"color": color, "width": 1}},
                name=f"{name}, skipped",
                hovertemplate=f"{name}, step %{{x}} skipped<extra></extra>",
)  # fmt: skip


def _ticks(figure: go.Figure) -> dict[str, float]:
    """Whole powers of two, however few there are."""
    drawn = [y for trace in figure.data for y in trace.y]
    if not drawn:
        return {}
    return {"dtick": max(1, math.ceil((max(drawn) - min(drawn)) / MOST_TICKS))}


def _drawable(scale: float) -> bool:
    """Zero and Inf have no place on the axis; the table has them."""
    return 0 < scale < math.inf
