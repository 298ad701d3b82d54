"""Loss scale, loss and gradient norm over a shared axis of steps, with skips and non-finite values.

Skipped steps are marked on the scale. A loss or norm that is NaN or infinite has no place on its
axis, so it stands in a band of its own at the bottom: it is never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go
from ampscope.analysis.loss_scale import FiniteParts
from ampscope.records import StepRecord
from plotly.subplots import make_subplots

from app.palette import MEASURE, NONFINITE, OUTLINE

ROW_TITLES = ("loss scale", "loss", "gradient norm (unscaled)", "not finite")
ROW_HEIGHTS = (0.36, 0.26, 0.26, 0.12)
HEIGHT_PX = 720
LOG_FROM = 100.0  # ratio of largest to smallest norm
KINDS = (("NaN", "diamond"), ("+Inf", "triangle-up"), ("−Inf", "triangle-down"))


def scale_trajectory(
    steps: Sequence[StepRecord], loss: FiniteParts, norm: FiniteParts
) -> go.Figure:
    """``loss`` and ``norm`` are the series of ``steps``."""
    figure = make_subplots(
        rows=4,
        shared_xaxes=True,
        vertical_spacing=0.055,
        row_heights=list(ROW_HEIGHTS),
        subplot_titles=ROW_TITLES,
    )
    _add_scale(figure, [s for s in steps if s.scale is not None])
    _add_series(figure, loss, 2, "loss")
    _add_series(figure, norm, 3, "gradient norm")
    _add_band(figure, {"loss": loss, "gradient norm": norm})
    _lay_out(figure, steps, norm)
    return figure


def _add_scale(figure: go.Figure, scaled: list[StepRecord]) -> None:
    drawn = [(s, math.log2(s.scale)) for s in scaled if s.scale and math.isfinite(s.scale)]
    texts = [_scale_text(s) for s, _ in drawn]
    figure.add_trace(
        go.Scatter(
            x=[s.step for s, _ in drawn],
            y=[exponent for _, exponent in drawn],
            mode="lines+markers" if len(drawn) <= 60 else "lines",
            line={"shape": "hv", "color": MEASURE, "width": 2},
            marker={"size": 5},
            text=texts,
            hovertemplate="%{text}<extra></extra>",
            name="loss scale",
            showlegend=False,
        ),
        row=1,
        col=1,
    )
    skipped = [(s, exponent) for s, exponent in drawn if s.skipped]
    figure.add_trace(
        go.Scatter(
            x=[s.step for s, _ in skipped],
            y=[exponent for _, exponent in skipped],
            mode="markers",
            marker={
                "symbol": "x",
                "size": 11,
                "color": MEASURE,
                "line": {"color": OUTLINE, "width": 1},
            },
            text=[_scale_text(s) for s, _ in skipped],
            hovertemplate="%{text}<extra></extra>",
            name="skipped step",
        ),
        row=1,
        col=1,
    )


def _scale_text(step: StepRecord) -> str:
    scale = step.scale or 0.0
    parts = [f"step {step.step}", f"scale {scale:,g} = 2^{math.log2(scale):g}"]
    if step.growth_counter is not None:
        parts.append(f"growth counter {step.growth_counter}")
    return "<br>".join([*parts, "<b>skipped</b>"] if step.skipped else parts)


def _add_series(figure: go.Figure, series: FiniteParts, row: int, name: str) -> None:
    """Gaps where values are missing or not finite: the line must not bridge them."""
    values = dict(zip(series.steps, series.values, strict=True))
    lost = {*series.nan_steps, *series.pos_inf_steps, *series.neg_inf_steps}
    steps = sorted({*values, *lost})
    figure.add_trace(
        go.Scatter(
            x=steps,
            y=[values.get(step) for step in steps],
            mode="lines+markers" if len(steps) <= 60 else "lines",
            line={"color": MEASURE, "width": 2},
            marker={"size": 5},
            connectgaps=False,
            hovertemplate=f"step %{{x}}<br>{name} %{{y:.5g}}<extra></extra>",
            name=name,
            showlegend=False,
        ),
        row=row,
        col=1,
    )


def _add_band(figure: go.Figure, series: dict[str, FiniteParts]) -> None:
    for (kind, symbol), field in zip(
        KINDS, ("nan_steps", "pos_inf_steps", "neg_inf_steps"), strict=True
    ):
        points = [(step, name) for name, s in series.items() for step in getattr(s, field)]
        if not points:
            continue
        figure.add_trace(
            go.Scatter(
                x=[step for step, _ in points],
                y=[name for _, name in points],
                mode="markers",
                marker={
                    "symbol": symbol,
                    "size": 10,
                    "color": NONFINITE,
                    "line": {"color": OUTLINE, "width": 1},
                },
                name=kind,
                hovertemplate=f"step %{{x}}<br>%{{y}} is {kind}<extra></extra>",
            ),
            row=4,
            col=1,
        )


def _lay_out(figure: go.Figure, steps: Sequence[StepRecord], norm: FiniteParts) -> None:
    figure.update_layout(
        height=HEIGHT_PX,
        margin={"t": 40, "b": 50, "l": 10, "r": 10},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.05, "yanchor": "bottom"},
        hovermode="closest",
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    figure.update_yaxes(row=1, col=1, title="log2", tickprefix="2<sup>", ticksuffix="</sup>")
    figure.update_yaxes(row=1, col=1, dtick=_scale_tick(steps))
    figure.update_yaxes(row=2, col=1, title="loss")
    kind = "log" if _spans_decades(norm.values) else "linear"
    figure.update_yaxes(row=3, col=1, title="2-norm", type=kind, dtick=1 if kind == "log" else None)
    figure.update_yaxes(
        row=4,
        col=1,
        type="category",
        categoryarray=["gradient norm", "loss"],
        range=[-0.6, 1.6],
        tickvals=["gradient norm", "loss"],
    )
    if steps:
        pad = max(0.5, 0.01 * (steps[-1].step - steps[0].step))
        figure.update_xaxes(range=[steps[0].step - pad, steps[-1].step + pad])
    figure.update_xaxes(row=4, col=1, title="step")


def _spans_decades(values: Sequence[float]) -> bool:
    """A log axis pays from two decades on; it cannot show zeros."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= LOG_FROM


def _scale_tick(steps: Sequence[StepRecord]) -> int:
    exponents = [math.log2(s.scale) for s in steps if s.scale and math.isfinite(s.scale)]
    span = max(exponents) - min(exponents) if exponents else 1
    return max(1, math.ceil(span / 6))
