"""A training over its steps: loss, loss scale, gradient norm, time of a step, and where histograms
were taken. What was not recorded has no panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from ampscope.analysis.loss_scale import FiniteParts, finite_parts
from ampscope.records import StepRecord
from app.figures.step_panels import (
    add_band,
    add_norm_axis,
    add_scale,
    add_series,
    frame_axis,
    panels,
)
from app.palette import MEASURE

BEFORE_CLIP = "gradient norm before the clip"
Spans = Sequence[tuple[int, int]]


def training_curves(
    steps: Sequence[StepRecord], loss: FiniteParts, norm: FiniteParts, taken: Spans
) -> go.Figure:
    """``taken`` are the first and last steps of the frames."""
    scaled = [s for s in steps if s.scale is not None]
    timed = [s for s in steps if s.step_time_s is not None]
    shown = ["loss"] + ["scale"] * bool(scaled) + ["norm"] * bool(norm.steps or norm.nan_steps)
    shown += ["time"] * bool(timed) + ["taken"] * bool(taken)
    named = {"loss": loss, "gradient norm": norm}
    clipped = [s for s in steps if s.unclipped_norm is not None]
    if clipped:
        before = finite_parts([s.step for s in clipped], [s.unclipped_norm for s in clipped])
        named[BEFORE_CLIP] = before
    shown += ["band"] * any(parts.nonfinite_count for parts in named.values())
    row = {name: i for i, name in enumerate(shown, start=1)}
    figure = panels(shown)
    add_series(figure, loss, row["loss"], "loss")
    figure.update_yaxes(row=row["loss"], col=1, title="loss")
    if "scale" in row:
        add_scale(figure, scaled, row["scale"])
    if "norm" in row:
        add_series(figure, norm, row["norm"], "gradient norm")
        if BEFORE_CLIP in named:
            add_series(figure, before, row["norm"], BEFORE_CLIP, points_only=True)
            norm = replace(norm, values=(*norm.values, *before.values))
        add_norm_axis(figure, norm, row["norm"])
    if "time" in row:
        _add_times(figure, timed, row["time"])
    if "taken" in row:
        _add_taken(figure, taken, row["taken"])
    if "band" in row:
        add_band(figure, named, row["band"])
    frame_axis(figure, steps, len(shown))
    figure.update_layout(uirevision="training")  # a new step must not undo a person's zoom
    return figure


def _add_times(figure: go.Figure, timed: Sequence[StepRecord], row: int) -> None:
    parts = finite_parts([s.step for s in timed], [1000 * (s.step_time_s or 0) for s in timed])
    add_series(figure, parts, row, "ms")
    figure.update_yaxes(row=row, col=1, title="ms", rangemode="tozero")


def _add_taken(figure: go.Figure, taken: Spans, row: int) -> None:
    """A dot for a frame of one step, a bar for one that adds up several."""
    x = np.asarray([step for first, last in taken for step in (first, last, np.nan)], np.float64)
    figure.add_trace(
        go.Scatter(
            x=x,
            y=np.where(np.isnan(x), np.nan, 0.0),
            mode="lines+markers",
            line={"color": MEASURE, "width": 6},
            marker={"size": 5, "symbol": "line-ns", "line": {"color": MEASURE, "width": 1}},
            connectgaps=False,
            hovertemplate="histograms, step %{x}<extra></extra>",
            showlegend=False,
        ),
        row=row,
        col=1,
    )
    figure.update_yaxes(row=row, col=1, showticklabels=False, range=[-1, 1], showgrid=False)
