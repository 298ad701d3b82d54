"""Loss and loss scale of runs that are under way, one above the other on a common step axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.records import RunInfo, StepRecord
from app.palette import dtype_color
from app.text import cut, for_plotly

HEIGHT = 380
_DASHES = {"torch": "solid", "keras": "dash", "paddle": "dashdot"}
CHANGED = "longdash"  # with op lists that were changed
WITHOUT_SCALER = "dot"  # fp16 with and without a scaler share a colour; the dash tells them apart


def progress_figure(runs: Sequence[tuple[RunInfo, Sequence[StepRecord]]]) -> go.Figure:
    """``runs`` with what they have recorded so far; a run without a scaler has no scale curve."""
    has_scale = any(step.scale is not None for _, steps in runs for step in steps)
    rows = 2 if has_scale else 1
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    for run, steps in runs:
        look = _look(run)
        figure.add_trace(_curve(steps, [s.loss for s in steps], look, "loss %{y:.4g}"), 1, 1)
        if any(step.scale is not None for step in steps):
            values = [_log2(step.scale) for step in steps]
            stairs = {**look, "line": {**look["line"], "shape": "hv"}, "showlegend": False}
            scale = _curve(steps, values, stairs, "scale 2^%{y:.3g}")
            figure.add_trace(scale, 2, 1)
    last = max((run.spec.steps for run, _ in runs), default=1)
    figure.update_xaxes(range=[-0.5, max(last - 0.5, 1)], showgrid=False)
    figure.update_xaxes(title_text="step", row=rows, col=1)
    figure.update_yaxes(title_text="loss", row=1, col=1)
    if has_scale:
        figure.update_yaxes(title_text="log2 of loss scale", row=2, col=1, **_whole_ticks(figure))
    figure.update_layout(
        height=HEIGHT if has_scale else HEIGHT - 120,
        margin={"t": 32, "b": 0, "l": 0, "r": 8},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        uirevision="progress",  # a new step must not undo a person's zoom
    )
    return figure


def _whole_ticks(figure: go.Figure) -> dict[str, object]:
    """At least two powers of two above and below, so that a constant scale is not magnified."""
    values = [y for trace in figure.data if trace.yaxis == "y2" for y in trace.y if y is not None]
    low, high = math.floor(min(values)) - 2, math.ceil(max(values)) + 2
    return {"range": [low, high], "dtick": max(1, (high - low) // 5)}


def _look(run: RunInfo) -> dict[str, Any]:
    precision = run.spec.precision
    dash = WITHOUT_SCALER if "noscaler" in precision else _DASHES[run.spec.framework]
    if run.spec.control:
        dash = CHANGED
    name = run.spec.label or run.spec.mode
    return {
        "name": for_plotly(cut(name, 32)),
        "line": {"color": dtype_color(precision), "dash": dash, "width": 2},
    }


def _curve(
    steps: Sequence[StepRecord],
    values: Sequence[float | None],
    look: Mapping[str, object],
    hover: str,
) -> go.Scatter:
    finite = [v if v is not None and math.isfinite(v) else None for v in values]
    return go.Scatter(
        x=[step.step for step in steps],
        y=finite,
        mode="lines+markers" if len(steps) < 3 else "lines",
        hovertemplate=hover,
        **look,
    )


def _log2(scale: float | None) -> float | None:
    return math.log2(scale) if scale and math.isfinite(scale) and scale > 0 else None
