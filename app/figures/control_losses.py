"""Loss curves of one script under several controls, over a shared axis of optimizer steps.

A loss that is NaN or infinite has no place on the axis: it stands in a band of its own below, one
row a control, so none is dropped. Curves differ in dash as well as in colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.analysis.loss_scale import FiniteParts
from app.palette import NONFINITE, OUTLINE
from app.text import for_plotly

LOSS_PX, BAND_ROW_PX, BAND_EXTRA_PX, SPACING_PX = 260, 26, 30, 44
TOP_PX, BOTTOM_PX = 40, 46
LOG_FROM = 100.0  # two decades between the smallest and the largest loss
FEW_POINTS = 60
KINDS = (("NaN", "diamond"), ("+Inf", "triangle-up"), ("−Inf", "triangle-down"))


@dataclass(frozen=True, slots=True)
class Curve:
    """One control's losses and its look."""

    name: str
    losses: FiniteParts
    color: str
    dash: str


def control_losses(curves: Sequence[Curve], x_title: str = "optimizer step") -> go.Figure:
    """Losses above, what was not finite below."""
    broken = [c for c in curves if c.losses.nonfinite_count]
    band_px = BAND_ROW_PX * len(broken) + BAND_EXTRA_PX if broken else 0
    figure = _panels(band_px)
    for curve in curves:
        _add_curve(figure, curve)
    if broken:
        _add_band(figure, broken)
    steps = [s for c in curves for s in _steps(c.losses)]
    if steps:
        pad = max(0.5, 0.01 * (max(steps) - min(steps)))
        figure.update_xaxes(range=[min(steps) - pad, max(steps) + pad])
    figure.update_xaxes(row=2 if broken else 1, col=1, title=x_title)
    kind = "log" if _spans_decades(curves) else "linear"
    figure.update_yaxes(row=1, col=1, title="loss", type=kind, dtick=_dtick(curves, kind))
    figure.update_yaxes(row=1, col=1, exponentformat="power")
    return figure


def _panels(band_px: int) -> go.Figure:
    plot_px = LOSS_PX + (SPACING_PX + band_px if band_px else 0)
    figure = make_subplots(
        rows=2 if band_px else 1,
        shared_xaxes=True,
        row_heights=[LOSS_PX, band_px] if band_px else None,
        vertical_spacing=SPACING_PX / plot_px if band_px else 0,
        subplot_titles=["", "loss not finite"] if band_px else None,
    )
    figure.update_layout(
        height=plot_px + TOP_PX + BOTTOM_PX,
        margin={"t": TOP_PX, "b": BOTTOM_PX, "l": 10, "r": 10},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        hovermode="closest",
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    return figure


def _add_curve(figure: go.Figure, curve: Curve) -> None:
    """With gaps where the loss was not finite: the line must not bridge them."""
    values = dict(zip(curve.losses.steps, curve.losses.values, strict=True))
    steps = _steps(curve.losses)
    name = for_plotly(curve.name)
    figure.add_trace(
        go.Scatter(
            x=steps,
            y=[values.get(step) for step in steps],
            mode="lines+markers" if len(steps) <= FEW_POINTS else "lines",
            line={"color": curve.color, "width": 2, "dash": curve.dash},
            marker={"size": 4},
            connectgaps=False,
            name=name,
            hovertemplate=f"{name}<br>step %{{x}}, loss %{{y:.5g}}<extra></extra>",
        ),
        row=1,
        col=1,
    )


def _add_band(figure: go.Figure, broken: Sequence[Curve]) -> None:
    for (kind, symbol), field in zip(
        KINDS, ("nan_steps", "pos_inf_steps", "neg_inf_steps"), strict=True
    ):
        points = [(step, c.name) for c in broken for step in getattr(c.losses, field)]
        if points:
            figure.add_trace(
                go.Scatter(
                    x=[step for step, _ in points],
                    y=[for_plotly(name) for _, name in points],
                    mode="markers",
                    marker={
                        "symbol": symbol,
                        "size": 8,
                        "color": NONFINITE,
                        "line": {"color": OUTLINE, "width": 1},
                    },
                    name=kind,
                    hovertemplate=f"%{{y}}<br>step %{{x}}, the loss is {kind}<extra></extra>",
                ),
                row=2,
                col=1,
            )
    names = [for_plotly(c.name) for c in reversed(broken)]
    figure.update_yaxes(
        row=2,
        col=1,
        type="category",
        categoryarray=names,
        tickvals=names,
        range=[-0.6, len(names) - 0.4],
    )


def _steps(losses: FiniteParts) -> list[int]:
    lost = {*losses.nan_steps, *losses.pos_inf_steps, *losses.neg_inf_steps}
    return sorted({*losses.steps, *lost})


def _all_values(curves: Sequence[Curve]) -> list[float]:
    return [v for c in curves for v in c.losses.values]


def _spans_decades(curves: Sequence[Curve]) -> bool:
    values = _all_values(curves)
    return bool(values) and min(values) > 0 and max(values) / min(values) >= LOG_FROM


def _dtick(curves: Sequence[Curve], kind: str) -> float | None:
    """Whole decades, at most about six of them."""
    if kind == "linear":
        return None
    values = _all_values(curves)
    return float(max(1, math.ceil(math.log10(max(values) / min(values)) / 6)))
