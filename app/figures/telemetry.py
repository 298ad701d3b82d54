"""Readings of one device over time, the steps of the run on a second axis above. A quantity that
was not read, or that never changed, has no panel; :func:`panels_of` says which are drawn together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.analysis.telemetry import HELD_BACK
from ampscope.records import Sample, StepRecord
from ampscope.story.palette import MEASURE, OUTLINE, OVERFLOW
from app.text import for_plotly

SPACING_PX, TOP_PX, BOTTOM_PX, HEIGHT_PX, BAND_PX = 40, 64, 50, 120, 26
STEP_TICKS = 8
BEHIND = {"color": OUTLINE, "width": 1.5, "dash": "dot"}  # the first of two lines
# Longest run that is drawn in a unit, the unit's name, its seconds.
UNITS = ((600.0, "s", 1.0), (7200.0, "min", 60.0), (float("inf"), "h", 3600.0))
Value = Callable[[Sample], float | None]
GIB = 2**30


def telemetry_figure(
    samples: Sequence[Sample],
    origin: float,
    at_steps: Sequence[int | None] = (),
    steps: Sequence[StepRecord] = (),
) -> go.Figure:
    """``samples`` of one device; ``origin`` is time 0; ``at_steps`` the step under way at each
    sample, ``steps`` those that the upper axis names."""
    shown = [panel for panel in panels_of(samples[0].device) if _is_shown(panel, samples)]
    held = [reason for reason in HELD_BACK if any(reason in s.clock_reasons for s in samples)]
    lasted_s = samples[-1].at - samples[0].at
    unit, seconds = next((name, s) for longest, name, s in UNITS if lasted_s <= longest)
    x = np.asarray([(s.at - origin) / seconds for s in samples])
    figure = _empty(shown, bool(held))
    at = list(at_steps) or [None] * len(samples)
    notes = ["" if step is None else f"<br>step {step:,}" for step in at]
    for row, panel in enumerate(shown, start=1):
        _draw(figure, panel, samples, x, notes, row)
    if held:
        _draw_held(figure, held, samples, x, len(shown) + 1)
    figure.update_xaxes(
        row=len(shown) + bool(held), col=1, title=f"time ({unit})", showticklabels=True
    )
    figure.update_xaxes(range=[x[0], max(x[-1], x[0] + 1e-9)])
    marks = [((s.ended_at - origin) / seconds, s.step) for s in steps if s.ended_at is not None]
    if marks:
        _draw_steps(figure, [m for m in marks if x[0] <= m[0] <= x[-1]])
    return figure


@dataclass(frozen=True, slots=True)
class Panel:
    """What is drawn together: name of a line, its value."""

    title: str
    unit: str
    lines: tuple[tuple[str, Value], ...]
    always: bool = False  # also where it never changed
    top: float | None = None  # of the axis


def panels_of(device: str) -> tuple[Panel, ...]:
    """In the order in which they are drawn."""
    others = "all" if device == "cpu" else "GPU"
    return (
        Panel(
            "busy",
            "%",
            ((others, lambda s: s.busy_percent), ("the run", lambda s: s.own_percent)),
            always=True,
            top=105,
        ),
        Panel(
            "memory",
            "GiB",
            (
                ("by all processes", _scaled(lambda s: s.memory_used_bytes, GIB)),
                ("the run's process", _scaled(lambda s: s.own_memory_bytes, GIB)),
            ),
            always=True,
        ),
        Panel("power", "W", (("power", lambda s: s.power_w),)),
        Panel("temperature", "°C", (("temperature", lambda s: s.temperature_c),)),
        Panel(
            "clock",
            "MHz",
            (("memory", lambda s: s.memory_clock_mhz), ("cores", lambda s: s.clock_mhz)),
        ),
        Panel(
            "PCIe",
            "GB/s",
            (
                ("into the GPU", _scaled(lambda s: s.pcie_rx_bytes_s, 1e9)),
                ("out of it", _scaled(lambda s: s.pcie_tx_bytes_s, 1e9)),
            ),
        ),
    )


def _scaled(read: Callable[[Sample], float | None], factor: float) -> Value:
    def value(sample: Sample) -> float | None:
        found = read(sample)
        return None if found is None else found / factor

    return value


def _is_shown(panel: Panel, samples: Sequence[Sample]) -> bool:
    values = [{read(s) for s in samples} - {None} for _, read in panel.lines]
    return any(len(v) > (0 if panel.always else 1) for v in values)


def _empty(shown: Sequence[Panel], has_band: bool) -> go.Figure:
    heights = [HEIGHT_PX] * len(shown) + [BAND_PX] * has_band
    plot_px = sum(heights) + SPACING_PX * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights),
        shared_xaxes=True,
        vertical_spacing=SPACING_PX / plot_px if len(heights) > 1 else 0,
        row_heights=heights,
        subplot_titles=[panel.title for panel in shown] + ["held back"] * has_band,
    )
    figure.update_layout(
        height=plot_px + TOP_PX + BOTTOM_PX,
        margin={"t": TOP_PX, "b": BOTTOM_PX, "l": 10, "r": 10},
        showlegend=False,
        hovermode="closest",
        uirevision="telemetry",  # a new reading must not undo a person's zoom
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    figure.update_annotations(selector=0, yshift=22)  # above the axis of steps
    return figure


def _draw(
    figure: go.Figure,
    panel: Panel,
    samples: Sequence[Sample],
    x: np.ndarray,
    notes: Sequence[str],
    row: int,
) -> None:
    """The title names the lines: one legend for all panels would be far from most."""
    drawn = [name for name, read in panel.lines if any(read(s) is not None for s in samples)]
    for name, read in panel.lines:
        if name not in drawn:
            continue
        is_behind = len(drawn) > 1 and name == drawn[0]
        figure.add_scatter(
            x=x,
            y=[read(s) for s in samples],
            mode="lines",
            line=BEHIND if is_behind else {"color": MEASURE, "width": 1.5},
            text=notes,
            name=name,
            connectgaps=False,
            hovertemplate=f"{name} %{{y:,.4g}} {panel.unit}%{{text}}<extra></extra>",
            row=row,
            col=1,
        )
    if len(drawn) > 1:
        figure.layout.annotations[
            row - 1
        ].text = f"{panel.title}: {drawn[0]} (dotted), {drawn[1]} (solid)"
    limits = {"range": [0, panel.top]} if panel.top else {"rangemode": "tozero"}
    figure.update_yaxes(row=row, col=1, title=panel.unit, **limits)


def _draw_held(
    figure: go.Figure, held: Sequence[str], samples: Sequence[Sample], x: np.ndarray, row: int
) -> None:
    """A bar over the time in which anything held the clocks down; which, on hover."""
    names = [", ".join(r for r in held if r in s.clock_reasons) for s in samples]
    figure.add_scatter(
        x=x,
        y=[0.0 if name else None for name in names],
        mode="lines+markers",
        line={"color": OVERFLOW, "width": 8},
        marker={"color": OVERFLOW, "size": 7, "symbol": "square", "line": {"color": OUTLINE}},
        text=[for_plotly(name) for name in names],
        connectgaps=False,
        hovertemplate="%{text}<extra></extra>",
        row=row,
        col=1,
    )
    figure.layout.annotations[row - 1].text = f"held back: {for_plotly(', '.join(held))}"
    figure.update_yaxes(row=row, col=1, showticklabels=False, range=[-1, 1], showgrid=False)


def _draw_steps(figure: go.Figure, marks: Sequence[tuple[float, int]]) -> None:
    """Numbers of some steps where they ended. Plotly draws an axis that a trace uses."""
    if not marks:
        return  # a run so short that no step ended between two readings
    some = marks[:: max(1, ceil(len(marks) / STEP_TICKS))]
    name = f"x{len(list(figure.select_xaxes())) + 1}"
    figure.add_scatter(
        x=[m for m, _ in some],
        y=[None] * len(some),
        xaxis=name,
        yaxis="y",
    )
    figure.update_layout(
        {
            name.replace("x", "xaxis"): {
                "overlaying": "x",
                "matches": "x",
                "side": "top",
                "anchor": "y",
                "showgrid": False,
                "tickvals": [m for m, _ in some],
                "ticktext": [f"step {some[0][1]:,}"] + [f"{step:,}" for _, step in some[1:]],
            }
        }
    )
