"""Panels over a shared axis of steps: loss scale, loss, gradient norm, step time.

Skipped steps are marked on the scale. A loss or norm that is NaN or infinite has no place on its
axis, so it stands in a band of its own at the bottom: it is never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.analysis.loss_scale import FiniteParts
from ampscope.records import StepRecord
from app.palette import MEASURE, NONFINITE, OUTLINE

# Panels: title, height in pixels.
PANELS = {
    "scale": ("loss scale", 210),
    "loss": ("loss", 160),
    "norm": ("gradient norm (unscaled)", 160),
    "time": ("time of a step", 120),
    "band": ("not finite", 70),
    "taken": ("histograms taken", 34),
}
SPACING_PX, TOP_PX, BOTTOM_PX = 46, 44, 50
LOG_FROM = 100.0  # ratio of largest to smallest norm
MOST_MARKS = 60  # points that are marked one by one
KINDS = (("NaN", "diamond"), ("+Inf", "triangle-up"), ("−Inf", "triangle-down"))


def panels(shown: Sequence[str]) -> go.Figure:
    """Empty panels on a shared axis of steps."""
    heights = [PANELS[name][1] for name in shown]
    plot_px = sum(heights) + SPACING_PX * (len(shown) - 1)
    figure = make_subplots(
        rows=len(shown),
        shared_xaxes=True,
        vertical_spacing=SPACING_PX / plot_px,
        row_heights=heights,
        subplot_titles=[PANELS[name][0] for name in shown],
    )
    figure.update_layout(
        height=plot_px + TOP_PX + BOTTOM_PX,
        margin={"t": TOP_PX, "b": BOTTOM_PX, "l": 10, "r": 10},
        legend={
            "orientation": "h",
            "x": 1,
            "xanchor": "right",
            "y": 1,
            "yanchor": "top",
            "yref": "container",
        },
        hovermode="closest",
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    return figure


def add_scale(figure: go.Figure, scaled: list[StepRecord], row: int) -> None:
    drawn = [(s, math.log2(s.scale)) for s in scaled if s.scale and 0 < s.scale < math.inf]
    texts = [_scale_text(s) for s, _ in drawn]
    figure.add_trace(
        go.Scatter(
            x=np.asarray([s.step for s, _ in drawn], np.int64),
            y=np.asarray([exponent for _, exponent in drawn], np.float64),
            mode="lines+markers" if len(drawn) <= MOST_MARKS else "lines",
            line={"shape": "hv", "color": MEASURE, "width": 2},
            marker={"size": 5},
            text=texts,
            hovertemplate="%{text}<extra></extra>",
            name="loss scale",
            showlegend=False,
        ),
        row=row,
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
                "size": 11 if len(skipped) <= MOST_MARKS else 6,
                "color": NONFINITE,  # a gradient was: that is why
                "line": {"color": OUTLINE, "width": 1},
            },
            text=[_scale_text(s) for s, _ in skipped],
            hovertemplate="%{text}<extra></extra>",
            name="skipped step",
        ),
        row=row,
        col=1,
    )

    ticks = {"tickprefix": "2<sup>", "ticksuffix": "</sup>", "dtick": _scale_tick(scaled)}
    figure.update_yaxes(row=row, col=1, title="log2", **ticks)


def _scale_text(step: StepRecord) -> str:
    scale = step.scale or 0.0
    parts = [f"step {step.step}", f"scale {scale:,g} = 2^{math.log2(scale):g}"]
    if step.growth_counter is not None:
        parts.append(f"growth counter {step.growth_counter}")
    return "<br>".join([*parts, "<b>skipped</b>"] if step.skipped else parts)


def add_series(
    figure: go.Figure, series: FiniteParts, row: int, name: str, *, points_only: bool = False
) -> None:
    """Gaps where values are missing or not finite: the line must not bridge them. Of a series that
    only some steps have, ``points_only`` draws rings, named in the legend."""
    values = dict(zip(series.steps, series.values, strict=True))
    lost = {*series.nan_steps, *series.pos_inf_steps, *series.neg_inf_steps}
    steps = sorted({*values, *lost})
    line = "lines+markers" if len(steps) <= MOST_MARKS else "lines"
    figure.add_trace(
        go.Scatter(
            x=np.asarray(steps, np.int64),  # Plotly looks at every element of a list
            y=[values.get(step) for step in steps],
            mode="markers" if points_only else line,
            line={"color": MEASURE, "width": 2},
            marker={"size": 5, "color": MEASURE, "symbol": "circle-open" if points_only else None},
            connectgaps=False,
            hovertemplate=f"step %{{x}}<br>{name} %{{y:.5g}}<extra></extra>",
            name=name,
            showlegend=points_only,
        ),
        row=row,
        col=1,
    )


def add_band(figure: go.Figure, series: dict[str, FiniteParts], row: int) -> None:
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
            row=row,
            col=1,
        )
    names = list(reversed(series))
    figure.update_yaxes(
        row=row, col=1, type="category", categoryarray=names, tickvals=names, range=[-0.6, 1.6]
    )


def spans_decades(values: Sequence[float]) -> bool:
    """A log axis pays from two decades on; it cannot show zeros."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= LOG_FROM


def _scale_tick(steps: Sequence[StepRecord]) -> int:
    exponents = [math.log2(s.scale) for s in steps if s.scale and 0 < s.scale < math.inf]
    span = max(exponents) - min(exponents) if exponents else 1
    return max(1, math.ceil(span / 6))


def frame_axis(figure: go.Figure, steps: Sequence[StepRecord], last_row: int) -> None:
    """Both ends of the shared axis, with room for a mark at each."""
    if steps:
        pad = max(0.5, 0.01 * (steps[-1].step - steps[0].step))
        figure.update_xaxes(range=[steps[0].step - pad, steps[-1].step + pad])
    figure.update_xaxes(row=last_row, col=1, title="step")


def add_norm_axis(figure: go.Figure, norm: FiniteParts, row: int) -> None:
    """Logarithmic where the norms span decades."""
    kind = "log" if spans_decades(norm.values) else "linear"
    dtick = 1 if kind == "log" else None
    figure.update_yaxes(row=row, col=1, title="2-norm", type=kind, dtick=dtick)
