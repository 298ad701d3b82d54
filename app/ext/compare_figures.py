"""The time of a step by phase and precision as bars, and throughput against the batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.ext.compare.batches import BatchSearch
from ampscope.ext.compare.comparison import PrecisionResults
from ampscope.records import StepTimes
from ampscope.story.palette import OUTLINE, dtype_color
from app.figures import ABOVE
from app.figures.hardware import error_bars
from app.figures.memory import add_bars, stacked
from app.text import for_plotly

FAR = 8.0  # times the fastest
PHASES = (("forward", ""), ("backward", "/"), ("optimizer", "x"))


def step_bars(measured: Sequence[PrecisionResults]) -> go.Figure:
    """Milliseconds of a step; the error bar is the quartiles of the whole step."""
    shown = [(m.precision, m.times) for m in measured if m.times is not None]
    figure = go.Figure()
    for place, (phase, pattern) in enumerate(PHASES):
        values = [_phase_ms(times, place) for _, times in shown]
        if any(value is not None for value in values):
            add_bars(figure, phase, pattern, [name for name, _ in shown], values, "ms")
    if not figure.data:
        totals: list[float | None] = [times.step.median_s * 1e3 for _, times in shown]
        add_bars(figure, "step", "", [name for name, _ in shown], totals, "ms")
    medians = [times.step.median_s * 1e3 for _, times in shown]
    figure.add_scatter(
        x=medians,
        y=[for_plotly(name) for name, _ in shown],
        mode="markers",
        marker={"symbol": "line-ns", "size": 14, "line": {"width": 2, "color": OUTLINE}},
        error_x=error_bars(
            medians,
            [times.step.low_s * 1e3 for _, times in shown],
            [times.step.high_s * 1e3 for _, times in shown],
            color=OUTLINE,
        ),
        name="whole step, quartiles",
        hovertemplate="%{y}: %{x:.4g} ms, median<extra></extra>",
    )
    stacked(figure, len(shown), "time of a step (ms)")
    _shorten(figure, [(name, times.step.median_s) for name, times in shown])
    return figure


def _shorten(figure: go.Figure, medians: Sequence[tuple[str, float]]) -> None:
    """Half matmuls without an instruction take a hundred times as long: such a bar runs out of
    the picture, with its figure beside it, so that the others can be distinguished."""
    fastest = min(median for _, median in medians)
    inside = [median for _, median in medians if median <= FAR * fastest]
    for name, median in medians:
        if median > FAR * fastest:
            figure.add_annotation(
                x=1, xref="x domain", xanchor="right", y=for_plotly(name), showarrow=False,
                text=f"{median:,.3g} s, beyond this axis →", bgcolor=OUTLINE,
                font={"color": "#FFFFFF"},
            )  # fmt: skip
    if len(inside) < len(medians):
        figure.update_xaxes(range=[0, 1.3e3 * max(inside)])


def _phase_ms(times: StepTimes, place: int) -> float | None:
    phase = (times.forward, times.backward, times.optimizer)[place]
    return None if phase is None else phase.median_s * 1e3


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star")


def throughput(searches: Sequence[BatchSearch]) -> go.Figure:
    """Samples per second against the batch size: a line per precision, dotted where it did not fit.
    Both axes are logarithmic: a line that bends flat has no use for a larger batch."""
    figure = go.Figure()
    for place, search in enumerate(searches):
        _add_throughput(figure, search, SYMBOLS[place % len(SYMBOLS)])
    figure.update_layout(
        height=360,
        margin={"t": 40, "b": 50, "l": 10, "r": 10},
        legend=ABOVE,
        xaxis={"title": "samples per step", "type": "log", "dtick": "D2"},
        yaxis={"title": "samples per second", "type": "log", "dtick": "D2"},
    )
    return figure


def _add_throughput(figure: go.Figure, search: BatchSearch, symbol: str) -> None:
    timed = [(t, t.step) for t in search.trials if t.step is not None]
    color = dtype_color(search.precision)
    figure.add_scatter(
        x=[t.samples for t, _ in timed],
        y=[t.samples_s for t, _ in timed],
        error_y=error_bars(
            [t.samples / s.median_s for t, s in timed],
            [t.samples / s.high_s for t, s in timed],
            [t.samples / s.low_s for t, s in timed],
            color=OUTLINE,
            thickness=1,
        ),
        mode="lines+markers",
        line={"color": color, "width": 2},
        marker={"symbol": symbol, "size": 8},
        name=for_plotly(search.precision),
        hovertemplate=f"{for_plotly(search.precision)}, %{{x:,}} samples: %{{y:,.4g}} a second"
        "<extra></extra>",
    )
    knee, largest = search.knee, search.largest
    if knee is not None:  # annotations on a logarithmic axis stand at the exponent
        figure.add_annotation(
            x=math.log10(knee.samples), y=math.log10(knee.samples_s or 1), showarrow=True, ay=-34,
            text="throughput stops growing here" if search.levels_off else "fastest that was timed",
            arrowcolor=color,
        )  # fmt: skip
    if largest is not None and largest.too_many:
        figure.add_vline(x=largest.too_many, line={"color": color, "dash": "dot", "width": 2})
