"""Underflow of one module over time: three panels, one a count, on a shared axis of steps.

Three panels and not three lines: the shares differ by orders of magnitude, and each has its own
meaning. A marker stands at each step with a shadow; nothing is drawn in between but a thin line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.palette import OUTLINE, ZONES

PANELS = (
    ("lost", "lost", "lost: zero in half, not in the shadow"),
    ("subnormal", "subnormal", "subnormal: kept with fewer bits"),
    ("zero_before", "zero", "was zero already, in both"),
)
HEIGHT_PX = 460


@dataclass(frozen=True, slots=True)
class Line:
    """Counts of one kind at the steps that have a shadow."""

    steps: Sequence[int]
    counts: Sequence[int]
    totals: Sequence[int]


def underflow_lines(lines: dict[str, Line]) -> go.Figure:
    """``lines`` by the names in PANELS; y is the share of the module's elements in percent."""
    figure = make_subplots(
        rows=len(PANELS),
        shared_xaxes=True,
        vertical_spacing=0.09,
        subplot_titles=[title for _, _, title in PANELS],
    )
    for row, (name, zone, _) in enumerate(PANELS, start=1):
        line = lines[name]
        shares = [100 * n / t if t else None for n, t in zip(line.counts, line.totals, strict=True)]
        figure.add_trace(
            go.Scatter(
                x=list(line.steps),
                y=shares,
                mode="lines+markers",
                line={"color": ZONES[zone], "width": 2},
                marker={"size": 9, "color": ZONES[zone], "line": {"color": OUTLINE, "width": 1}},
                text=[f"{n:,} of {t:,}" for n, t in zip(line.counts, line.totals, strict=True)],
                hovertemplate="step %{x}<br>%{text}, %{y:.3g} %<extra></extra>",
                showlegend=False,
            ),
            row=row,
            col=1,
        )
        top = max((s for s in shares if s is not None), default=0.0)
        figure.update_yaxes(
            row=row, col=1, title="% of elements", range=[-0.06 * (top or 1), 1.15 * (top or 1)]
        )
    figure.update_xaxes(title="step", row=len(PANELS), col=1)
    figure.update_layout(height=HEIGHT_PX, margin={"t": 36, "b": 50, "l": 10, "r": 10})
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    return figure
