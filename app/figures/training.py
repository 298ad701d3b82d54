"""Charts over the steps of a training, or of several: panels on one axis, and what was not recorded
has no panel.

A loss or norm that is NaN or infinite has no place on its axis, so it stands in a band of its own
at the bottom: it is never dropped. Skipped steps are marked on the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.analysis.training import FiniteParts, finite_parts
from ampscope.records import RunInfo, StepRecord
from ampscope.story.palette import MEASURE, NONFINITE, OUTLINE, dtype_color
from app.figures import ABOVE, TOOLBAR_PX
from app.text import cut, for_plotly, power

BEFORE_CLIP = "gradient norm before the clip"
Spans = Sequence[tuple[int, int]]
PANELS = {  # title, height in pixels
    "scale": ("loss scale", 210),
    "loss": ("loss", 160),
    "norm": ("gradient norm (unscaled)", 160),
    "time": ("time of a step", 120),
    "band": ("not finite", 70),
    "taken": ("histograms taken", 34),
}
SPACING_PX, TOP_PX, BOTTOM_PX = 46, 44 + TOOLBAR_PX, 50
LOG_FROM = 100.0  # ratio of the largest to the smallest value
EXPLODES_FROM = 1e6  # of losses
MOST_TICKS = 6
MOST_MARKS = 60  # points that are marked one by one
KINDS = (  # name, symbol, field of FiniteParts
    ("NaN", "diamond", "nan_steps"),
    ("+Inf", "triangle-up", "pos_inf_steps"),
    ("−Inf", "triangle-down", "neg_inf_steps"),
)
LOSS_PX, BAND_ROW_PX, BAND_EXTRA_PX, CONTROL_SPACING_PX = 260, 26, 30, 44
CONTROL_TOP_PX, CONTROL_BOTTOM_PX = 40, 46
HEIGHT = 380
_POWERS = {"tickprefix": "2<sup>", "ticksuffix": "</sup>"}  # of an axis of log2
_DASHES = {"torch": "solid", "keras": "dash", "paddle": "dashdot"}
CHANGED = "longdash"  # with op lists that were changed
WITHOUT_SCALER = "dot"  # fp16 with and without a scaler share a colour; the dash distinguishes them


def training_curves(
    steps: Sequence[StepRecord], loss: FiniteParts, norm: FiniteParts, taken: Spans
) -> go.Figure:
    """A watched training: loss, loss scale, gradient norm, time of a step, and where histograms
    were taken; ``taken`` are the first and last steps of the frames."""
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
    figure = _panels([PANELS[name] for name in shown])
    _add_series(figure, loss, row["loss"], "loss")
    _add_loss_axis(figure, loss.values, row["loss"])
    if "scale" in row:
        _add_scale(figure, scaled, row["scale"])
    if "norm" in row:
        _add_series(figure, norm, row["norm"], "gradient norm")
        if BEFORE_CLIP in named:
            _add_series(figure, before, row["norm"], BEFORE_CLIP, points_only=True)
            norm = replace(norm, values=(*norm.values, *before.values))
        _add_axis(figure, norm.values, row["norm"], "2-norm")
    if "time" in row:
        _add_times(figure, timed, row["time"])
    if "taken" in row:
        _add_taken(figure, taken, row["taken"])
    if "band" in row:
        _add_band(figure, named, row["band"])
    _frame_axis(figure, steps, len(shown))
    figure.update_layout(uirevision="training")  # a new step must not undo a person's zoom
    return figure


def _add_times(figure: go.Figure, timed: Sequence[StepRecord], row: int) -> None:
    parts = finite_parts([s.step for s in timed], [1000 * (s.step_time_s or 0) for s in timed])
    _add_series(figure, parts, row, "ms")
    figure.update_yaxes(row=row, col=1, title="ms", rangemode="tozero")


def _add_taken(figure: go.Figure, taken: Spans, row: int) -> None:
    """A dot for a frame of one step, a bar for one that adds up several."""
    x = np.asarray([step for first, last in taken for step in (first, last, np.nan)], np.float64)
    figure.add_scatter(
        x=x,
        y=np.where(np.isnan(x), np.nan, 0.0),
        mode="lines+markers",
        line={"color": MEASURE, "width": 6},
        marker={"size": 5, "symbol": "line-ns", "line": {"color": MEASURE, "width": 1}},
        connectgaps=False,
        hovertemplate="histograms, step %{x}<extra></extra>",
        showlegend=False,
        row=row,
        col=1,
    )
    figure.update_yaxes(row=row, col=1, showticklabels=False, range=[-1, 1], showgrid=False)


def scale_trajectory(
    steps: Sequence[StepRecord], loss: FiniteParts, norm: FiniteParts
) -> go.Figure:
    """Loss scale, ``loss`` and ``norm``, which are the series of ``steps``. The panel of the scale
    is left out where there is none, those of loss and norm where none was finite, and the band of
    non-finite values where there is none."""
    scaled = [s for s in steps if s.scale is not None]
    shown = ["scale"] * bool(scaled) + ["loss"] * bool(loss.values)
    shown += ["norm"] * bool(norm.values)
    shown += ["band"] * bool(loss.nonfinite_count + norm.nonfinite_count)
    shown = shown or ["loss"]
    row = {name: i for i, name in enumerate(shown, start=1)}
    figure = _panels([PANELS[name] for name in shown])
    if scaled:
        _add_scale(figure, scaled, row["scale"])
    if "loss" in row:
        _add_series(figure, loss, row["loss"], "loss")
        _add_loss_axis(figure, loss.values, row["loss"])
    if "norm" in row:
        _add_series(figure, norm, row["norm"], "gradient norm")
        _add_axis(figure, norm.values, row["norm"], "2-norm")
    if "band" in row:
        _add_band(figure, {"loss": loss, "gradient norm": norm}, row["band"])
    _frame_axis(figure, steps, len(shown))
    return figure


@dataclass(frozen=True, slots=True)
class DrawnCurve:
    """One control's losses and its look."""

    name: str
    losses: FiniteParts
    color: str
    dash: str


def control_losses(curves: Sequence[DrawnCurve], x_title: str = "optimizer step") -> go.Figure:
    """Losses of one script under several controls above, what was not finite below, one row per
    control. Curves differ in dash as well as in colour."""
    broken = [c for c in curves if c.losses.nonfinite_count]
    band = ("loss not finite", BAND_ROW_PX * len(broken) + BAND_EXTRA_PX)
    shown = [("", LOSS_PX), *([band] if broken else [])]
    figure = _stacked(shown, CONTROL_SPACING_PX, CONTROL_TOP_PX, CONTROL_BOTTOM_PX)
    for curve in curves:
        _add_curve(figure, curve)
    if broken:
        named = {for_plotly(c.name): c.losses for c in broken}
        hover = "%{{y}}<br>step %{{x}}, the loss is {kind}<extra></extra>"
        _add_nonfinite(figure, named, 2, 8, hover)
        figure.update_yaxes(row=2, col=1, range=[-0.6, len(named) - 0.4])
    steps = [s for c in curves for s in _steps(c.losses)]
    if steps:
        pad = max(0.5, 0.01 * (max(steps) - min(steps)))
        figure.update_xaxes(range=[min(steps) - pad, max(steps) + pad])
    figure.update_xaxes(row=2 if broken else 1, col=1, title=x_title)
    values = [v for c in curves for v in c.losses.values]
    _add_axis(figure, values, 1, "loss")
    return figure


def paired_curves(
    pair: Sequence[tuple[DrawnCurve, FiniteParts, Sequence[StepRecord]]],
) -> go.Figure:
    """Two runs, one over the other: of each its losses with its look, its gradient norms and its
    steps. A panel that neither
    has is left out; what is not finite stands in a row for each run."""
    scaled = [[s for s in steps if s.scale is not None] for _, _, steps in pair]
    norms = [norm for _, norm, _ in pair]
    broken = {
        f"{name}, {which}": parts
        for which, (curve, norm, _) in zip(("first", "second"), pair, strict=True)
        for name, parts in (("loss", curve.losses), ("gradient norm", norm))
        if parts.nonfinite_count
    }
    shown = ["scale"] * any(scaled) + ["loss"]
    shown += ["norm"] * any(_steps(norm) for norm in norms)
    panels = [PANELS[name] for name in shown]
    if broken:
        panels.append(("not finite", BAND_ROW_PX * len(broken) + BAND_EXTRA_PX))
    figure = _panels(panels)
    row = {name: i for i, name in enumerate(shown, start=1)}
    for (curve, norm, _), own in zip(pair, scaled, strict=True):
        _add_curve(figure, curve, row["loss"])
        if own:
            _add_scale(figure, own, row["scale"], curve)
        if "norm" in row:
            beside = replace(curve, losses=norm)
            _add_curve(figure, beside, row["norm"], "gradient norm", in_legend=False)
    if any(scaled):
        dtick = _scale_tick([step for own in scaled for step in own])
        figure.update_yaxes(row=row["scale"], col=1, title="scale", **_POWERS, dtick=dtick)
    losses = [value for curve, _, _ in pair for value in curve.losses.values]
    _add_loss_axis(figure, losses, row["loss"])
    if "norm" in row:
        values = [value for norm in norms for value in norm.values]
        _add_axis(figure, values, row["norm"], "2-norm")
    if broken:
        hover = "%{{y}}<br>step %{{x}}, {kind}<extra></extra>"
        _add_nonfinite(figure, broken, len(panels), 8, hover)
        figure.update_yaxes(row=len(panels), col=1, range=[-0.6, len(broken) - 0.4])
    every_step = [step for _, _, steps in pair for step in steps]
    _frame_axis(figure, sorted(every_step, key=lambda s: s.step), len(panels))
    return figure


def _panels(shown: Sequence[tuple[str, int]]) -> go.Figure:
    """Empty panels on a shared axis of steps, with the legend in the upper right corner."""
    figure = _stacked(shown, SPACING_PX, TOP_PX, BOTTOM_PX)
    place = {"x": 1, "xanchor": "right", "y": 1, "yanchor": "top", "yref": "container"}
    figure.update_layout(legend={**ABOVE, **place})
    return figure


def _stacked(
    panels: Sequence[tuple[str, int]], spacing_px: int, top_px: int, bottom_px: int
) -> go.Figure:
    """Empty panels, each with title and height, one above the other."""
    heights = [height for _, height in panels]
    plot_px = sum(heights) + spacing_px * (len(panels) - 1)
    figure = make_subplots(
        rows=len(panels),
        shared_xaxes=True,
        vertical_spacing=spacing_px / plot_px,
        row_heights=heights,
        subplot_titles=[title for title, _ in panels],
    )
    figure.update_layout(
        height=plot_px + top_px + bottom_px,
        margin={"t": top_px, "b": bottom_px, "l": 10, "r": 10},
        legend=ABOVE,
        hovermode="closest",
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    return figure


def _add_scale(
    figure: go.Figure, scaled: Sequence[StepRecord], row: int, curve: DrawnCurve | None = None
) -> None:
    """The loss scale as stairs, with a cross at each skipped step. Of several runs in one panel
    ``curve`` says whose it is, by its look and in the hover text."""
    drawn = [(s, exponent) for s in scaled if (exponent := _log2(s.scale)) is not None]
    alone = curve is None
    whose = "" if curve is None else f"{for_plotly(curve.name)}<br>"
    line = {} if curve is None else {"dash": curve.dash}
    color = MEASURE if curve is None else curve.color
    hover = f"{whose}%{{text}}<extra></extra>"
    figure.add_scatter(
        x=np.asarray([s.step for s, _ in drawn], np.int64),
        y=np.asarray([exponent for _, exponent in drawn], np.float64),
        mode="lines+markers" if alone and len(drawn) <= MOST_MARKS else "lines",
        line={"shape": "hv", "color": color, "width": 2, **line},
        marker={"size": 5},
        text=[_scale_text(s) for s, _ in drawn],
        hovertemplate=hover,
        name="loss scale",
        showlegend=False,
        row=row,
        col=1,
    )
    skipped = [(s, exponent) for s, exponent in drawn if s.skipped]
    inside, around = (NONFINITE, OUTLINE) if alone else (color, NONFINITE)
    figure.add_scatter(
        x=[s.step for s, _ in skipped],
        y=[exponent for _, exponent in skipped],
        mode="markers",
        marker={
            "symbol": "x",
            "size": 11 if len(skipped) <= MOST_MARKS else 6,
            "color": inside,  # a gradient was not finite: that is why
            "line": {"color": around, "width": 1},
        },
        text=[_scale_text(s) for s, _ in skipped],
        hovertemplate=hover,
        name="skipped step",
        showlegend=None if alone else False,
        row=row,
        col=1,
    )
    ticks = {**_POWERS, "dtick": _scale_tick(scaled)}
    figure.update_yaxes(row=row, col=1, title="scale", **ticks)


def _scale_text(step: StepRecord) -> str:
    scale = step.scale or 0.0
    parts = [f"step {step.step}", f"scale {scale:,g} = {power(math.log2(scale))}"]
    if step.growth_counter is not None:
        parts.append(f"growth counter {step.growth_counter}")
    return "<br>".join([*parts, "<b>skipped</b>"] if step.skipped else parts)


def _scale_tick(steps: Sequence[StepRecord]) -> int:
    exponents = [math.log2(s.scale) for s in steps if s.scale and 0 < s.scale < math.inf]
    span = max(exponents) - min(exponents) if exponents else 1
    return max(1, math.ceil(span / 6))


def _add_series(
    figure: go.Figure, series: FiniteParts, row: int, name: str, *, points_only: bool = False
) -> None:
    """Gaps where values are missing or not finite: the line must not bridge them. Of a series that
    only some steps have, ``points_only`` draws rings, named in the legend."""
    values = dict(zip(series.steps, series.values, strict=True))
    steps = _steps(series)
    line = "lines+markers" if len(steps) <= MOST_MARKS else "lines"
    figure.add_scatter(
        x=np.asarray(steps, np.int64),  # Plotly looks at every element of a list
        y=[values.get(step) for step in steps],
        mode="markers" if points_only else line,
        line={"color": MEASURE, "width": 2},
        marker={"size": 5, "color": MEASURE, "symbol": "circle-open" if points_only else None},
        connectgaps=False,
        hovertemplate=f"step %{{x}}<br>{name} %{{y:.5g}}<extra></extra>",
        name=name,
        showlegend=points_only,
        row=row,
        col=1,
    )


def _add_curve(
    figure: go.Figure,
    curve: DrawnCurve,
    row: int = 1,
    what: str = "loss",
    *,
    in_legend: bool = True,
) -> None:
    """With gaps where the values were not finite: the line must not bridge them."""
    values = dict(zip(curve.losses.steps, curve.losses.values, strict=True))
    steps = _steps(curve.losses)
    name = for_plotly(curve.name)
    figure.add_scatter(
        x=steps,
        y=[values.get(step) for step in steps],
        mode="lines+markers" if len(steps) <= MOST_MARKS else "lines",
        line={"color": curve.color, "width": 2, "dash": curve.dash},
        marker={"size": 4},
        connectgaps=False,
        name=name,
        hovertemplate=f"{name}<br>step %{{x}}, {what} %{{y:.5g}}<extra></extra>",
        showlegend=in_legend,
        row=row,
        col=1,
    )


def _steps(losses: FiniteParts) -> list[int]:
    lost = {*losses.nan_steps, *losses.pos_inf_steps, *losses.neg_inf_steps}
    return sorted({*losses.steps, *lost})


def _add_band(figure: go.Figure, series: dict[str, FiniteParts], row: int) -> None:
    """A row for each of ``series``, where its points that are not finite stand."""
    _add_nonfinite(figure, series, row, 10, "step %{{x}}<br>%{{y}} is {kind}<extra></extra>")
    figure.update_yaxes(row=row, col=1, range=[-0.6, 1.6])


def _add_nonfinite(
    figure: go.Figure, series: dict[str, FiniteParts], row: int, size: int, hover: str
) -> None:
    """``hover`` has a place for the kind."""
    for kind, symbol, field in KINDS:
        points = [(step, name) for name, s in series.items() for step in getattr(s, field)]
        if not points:
            continue
        figure.add_scatter(
            x=[step for step, _ in points],
            y=[name for _, name in points],
            mode="markers",
            marker={
                "symbol": symbol,
                "size": size,
                "color": NONFINITE,
                "line": {"color": OUTLINE, "width": 1},
            },
            name=kind,
            hovertemplate=hover.format(kind=kind),
            row=row,
            col=1,
        )
    names = list(reversed(series))
    figure.update_yaxes(row=row, col=1, type="category", categoryarray=names, tickvals=names)


def _frame_axis(figure: go.Figure, steps: Sequence[StepRecord], last_row: int) -> None:
    """Both ends of the shared axis, with room for a mark at each."""
    if steps:
        pad = max(0.5, 0.01 * (steps[-1].step - steps[0].step))
        figure.update_xaxes(range=[steps[0].step - pad, steps[-1].step + pad])
    figure.update_xaxes(row=last_row, col=1, title="step")


def _add_loss_axis(figure: go.Figure, losses: Sequence[float], row: int) -> None:
    """Linear, as losses are read, but of an explosion that would leave nothing else to be seen."""
    explodes = _spans_decades(losses) and max(losses) / min(losses) >= EXPLODES_FROM
    how = {"type": "log", "dtick": _decades_tick(losses)} if explodes else {}
    figure.update_yaxes(row=row, col=1, title="loss", exponentformat="power", **how)


def _add_axis(figure: go.Figure, values: Sequence[float], row: int, title: str) -> None:
    """Logarithmic where the values span decades."""
    is_log = _spans_decades(values)
    how = {"type": "log", "dtick": _decades_tick(values)} if is_log else {"type": "linear"}
    figure.update_yaxes(row=row, col=1, title=title, exponentformat="power", **how)


def _spans_decades(values: Sequence[float]) -> bool:
    """A log axis pays from two decades on; it cannot show zeros."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= LOG_FROM


def _decades_tick(values: Sequence[float]) -> int:
    """At most seven powers of ten have a label."""
    return max(1, math.ceil(math.log10(max(values) / min(values)) / MOST_TICKS))


def progress_figure(runs: Sequence[tuple[RunInfo, Sequence[StepRecord]]]) -> go.Figure:
    """Loss and loss scale of ``runs`` that are under way, as far as they are recorded; a run
    without a scaler has no scale curve."""
    has_scale = any(step.scale is not None for _, steps in runs for step in steps)
    rows = 2 if has_scale else 1
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    for run, steps in runs:
        look = _look(run)
        figure.add_trace(_curve(steps, [s.loss for s in steps], look, "loss %{y:.4g}"), 1, 1)
        if any(step.scale is not None for step in steps):
            values = [_log2(step.scale) for step in steps]
            stairs = {**look, "line": {**look["line"], "shape": "hv"}, "showlegend": False}
            scale = _curve(steps, values, stairs, "scale 2<sup>%{y:.3g}</sup>")
            figure.add_trace(scale, 2, 1)
    last = max((run.spec.steps for run, _ in runs), default=1)
    figure.update_xaxes(range=[-0.5, max(last - 0.5, 1)], showgrid=False)
    figure.update_xaxes(title_text="step", row=rows, col=1)
    figure.update_yaxes(title_text="loss", row=1, col=1)
    if has_scale:
        figure.update_yaxes(title_text="loss scale", row=2, col=1, **_whole_ticks(figure))
    figure.update_layout(
        height=HEIGHT if has_scale else HEIGHT - 120,
        margin={"t": 32, "b": 0, "l": 0, "r": 8},
        hovermode="x unified",
        legend=ABOVE,
        uirevision="progress",  # a new step must not undo a person's zoom
    )
    return figure


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


def _whole_ticks(figure: go.Figure) -> dict[str, object]:
    """At least two powers of two above and below, so that a constant scale is not magnified."""
    values = [y for trace in figure.data if trace.yaxis == "y2" for y in trace.y if y is not None]
    low, high = math.floor(min(values)) - 2, math.ceil(max(values)) + 2
    return {**_POWERS, "range": [low, high], "dtick": max(1, (high - low) // 5)}


def _log2(scale: float | None) -> float | None:
    return math.log2(scale) if scale and math.isfinite(scale) and scale > 0 else None
