"""Loss scale, loss and gradient norm over a shared axis of steps, and what was not finite."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.analysis.loss_scale import FiniteParts
from ampscope.records import StepRecord
from app.figures.step_panels import (
    add_band,
    add_norm_axis,
    add_scale,
    add_series,
    frame_axis,
    panels,
)


def scale_trajectory(
    steps: Sequence[StepRecord], loss: FiniteParts, norm: FiniteParts
) -> go.Figure:
    """``loss`` and ``norm`` are the series of ``steps``. The panel of the scale is left out where
    there is none, and the band of non-finite values where there is none."""
    scaled = [s for s in steps if s.scale is not None]
    shown = ["scale"] * bool(scaled) + ["loss", "norm"]
    shown += ["band"] * bool(loss.nonfinite_count + norm.nonfinite_count)
    row = {name: i for i, name in enumerate(shown, start=1)}
    figure = panels(shown)
    if scaled:
        add_scale(figure, scaled, row["scale"])
    add_series(figure, loss, row["loss"], "loss")
    add_series(figure, norm, row["norm"], "gradient norm")
    if "band" in row:
        add_band(figure, {"loss": loss, "gradient norm": norm}, row["band"])
    figure.update_yaxes(row=row["loss"], col=1, title="loss")
    add_norm_axis(figure, norm, row["norm"])
    frame_axis(figure, steps, len(shown))
    return figure
