"""A step of each precision as bars: time by phase, and memory at the peak by what it is for.

Parts of a bar differ by pattern as well as by shade, because all of a bar has its dtype's colour.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.compare.figures import size
from ampscope.compare.views import Measured
from ampscope.records import MemorySplit, StepTimes
from app.palette import OUTLINE, dtype_color
from app.text import for_plotly

ROW_PX, EDGE_PX = 46, 100
FAR = 8.0  # times the fastest
PHASES = (("forward", ""), ("backward", "/"), ("optimizer", "x"))
# Field of MemorySplit, words, pattern.
PARTS = (
    ("weights", "weights", ""),
    ("gradients", "gradients", "-"),
    ("optimizer_state", "optimizer state", "x"),
    ("activations", "activations", "/"),
    ("cast_copies", "cast copies", "\\"),
    ("temporaries", "temporaries", "."),
    ("inputs", "inputs", "|"),
)


def step_bars(measured: Sequence[Measured]) -> go.Figure:
    """Milliseconds of a step; the error bar is the quartiles of the whole step."""
    shown = [(m.precision, m.times) for m in measured if m.times is not None]
    figure = go.Figure()
    for place, (phase, pattern) in enumerate(PHASES):
        values = [_phase_ms(times, place) for _, times in shown]
        if any(value is not None for value in values):
            _add(figure, phase, pattern, [name for name, _ in shown], values, "ms")
    if not figure.data:
        totals: list[float | None] = [times.step.median_s * 1e3 for _, times in shown]
        _add(figure, "step", "", [name for name, _ in shown], totals, "ms")
    medians = [times.step.median_s * 1e3 for _, times in shown]
    figure.add_trace(
        go.Scatter(
            x=medians,
            y=[for_plotly(name) for name, _ in shown],
            mode="markers",
            marker={"symbol": "line-ns", "size": 14, "line": {"width": 2, "color": OUTLINE}},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [
                    t.step.high_s * 1e3 - m for m, (_, t) in zip(medians, shown, strict=True)
                ],
                "arrayminus": [
                    m - t.step.low_s * 1e3 for m, (_, t) in zip(medians, shown, strict=True)
                ],
                "color": OUTLINE,
            },
            name="whole step, quartiles",
            hovertemplate="%{y}: %{x:.4g} ms, median<extra></extra>",
        )
    )
    _laid_out(figure, len(shown), "time of a step (ms)")
    _shorten(figure, [(name, times.step.median_s) for name, times in shown])
    return figure


def memory_bars(measured: Sequence[Measured]) -> go.Figure:
    """MiB of tensors when a step needs most; a mark where the allocator's own peak is known."""
    shown = [(m.precision, m.memory) for m in measured if m.memory is not None]
    figure = go.Figure()
    names = [name for name, _ in shown]
    for field, words, pattern in PARTS:
        values = [_mib(getattr(split, field)) for _, split in shown]
        if any(values):
            _add(figure, words, pattern, names, list(values), "MiB")
    peaks = [(name, split.device_peak) for name, split in shown if split.device_peak]
    if peaks:
        figure.add_trace(
            go.Scatter(
                x=[_mib(peak) for _, peak in peaks],
                y=[for_plotly(name) for name, _ in peaks],
                mode="markers",
                marker={"symbol": "diamond", "size": 10, "color": OUTLINE},
                name="the allocator's peak",
                hovertemplate="%{y}: %{x:,.1f} MiB with workspaces<extra></extra>",
            )
        )
    return _laid_out(figure, len(shown), "memory at the peak of a step (MiB)")


def _shorten(figure: go.Figure, medians: Sequence[tuple[str, float]]) -> None:
    """Half products without an instruction take a hundred times as long: such a bar runs out of
    the picture, with its figure beside it, so that the others can be told apart."""
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


def _add(
    figure: go.Figure,
    name: str,
    pattern: str,
    precisions: Sequence[str],
    values: Sequence[float | None],
    unit: str,
) -> None:
    figure.add_trace(
        go.Bar(
            x=list(values),
            y=[for_plotly(p) for p in precisions],
            orientation="h",
            name=name,
            marker={
                "color": [dtype_color(p) for p in precisions],
                "pattern": {"shape": pattern, "fgcolor": OUTLINE, "size": 6},
                "line": {"color": OUTLINE, "width": 1},
            },
            hovertemplate=f"%{{y}}, {for_plotly(name)}: %{{x:,.4g}} {unit}<extra></extra>",
        )
    )


def _laid_out(figure: go.Figure, rows: int, title: str) -> go.Figure:
    figure.update_layout(
        barmode="stack",
        height=ROW_PX * rows + EDGE_PX,
        margin={"t": 40, "b": 46, "l": 10, "r": 10},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        xaxis={"title": title, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "type": "category"},
    )
    return figure


def _phase_ms(times: StepTimes, place: int) -> float | None:
    phase = (times.forward, times.backward, times.optimizer)[place]
    return None if phase is None else phase.median_s * 1e3


def _mib(count: int) -> float:
    return count / 2**20


def memory_words(split: MemorySplit) -> str:
    """ "120 MiB activations, 37 MiB optimizer state, 21 MiB cast copies": the three largest."""
    parts = sorted(((getattr(split, f), words) for f, words, _ in PARTS), reverse=True)
    return ", ".join(f"{size(count)} {words}" for count, words in parts[:3] if count)
