"""Underflow of one module over time: a panel per count, on a shared axis of steps.

Panels and not lines in one: the shares differ by orders of magnitude, and each has its own
meaning. A marker stands at each step with a shadow; nothing is drawn in between but a thin line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.palette import LOST, MEASURE, OUTLINE, SUBNORMAL, ZERO

BELOW = ("below_range", LOST, "lost, below the format's range: underflow")
CANCELLED = ("cancelled", MEASURE, "lost, cancelled or flipped: rounding")
SUBNORMALS = ("subnormal", SUBNORMAL, "subnormal: kept with fewer bits")
ZEROS = ("zero_before", ZERO, "was zero already, in both")
PANELS = (BELOW, CANCELLED, SUBNORMALS, ZEROS)
UNSPLIT = (("lost", LOST, "lost: zero in half, not in the shadow"), SUBNORMALS, ZEROS)
PANEL_PX = 150


@dataclass(frozen=True, slots=True)
class Line:
    """Counts of one kind at the steps that have a shadow."""

    steps: Sequence[int]
    counts: Sequence[int]
    totals: Sequence[int]


def underflow_lines(lines: dict[str, Line]) -> go.Figure:
    """``lines`` by the names in PANELS, or in UNSPLIT for a run of a version that counted the lost
    ones together; y is the share of the module's elements in percent."""
    panels = UNSPLIT if "lost" in lines else PANELS
    figure = make_subplots(
        rows=len(panels),
        shared_xaxes=True,
        vertical_spacing=0.09,
        subplot_titles=[title for _, _, title in panels],
    )
    for row, (name, color, _) in enumerate(panels, start=1):
        line = lines[name]
        shares = [100 * n / t if t else None for n, t in zip(line.counts, line.totals, strict=True)]
        figure.add_trace(
            go.Scatter(
                x=list(line.steps),
                y=shares,
                mode="lines+markers",
                line={"color": color, "width": 2},
                marker={"size": 9, "color": color, "line": {"color": OUTLINE, "width": 1}},
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
    figure.update_xaxes(title="step", row=len(panels), col=1)
    figure.update_layout(height=PANEL_PX * len(panels), margin={"t": 36, "b": 50, "l": 10, "r": 10})
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    return figure
