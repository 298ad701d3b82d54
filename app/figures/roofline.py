"""A roofline: what each product reaches over how much it computes for each byte, under the ceilings
that were measured in the same run.

Colour is the dtype, symbol the verdict; the legend names both, so neither stands alone. Equal
products of several layers lie on one spot and are one dot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from app.palette import OUTLINE, dtype_color
from app.text import for_plotly

HEIGHT_PX = 460
SYMBOLS = {"used": "circle", "not used": "x", "unknown": "diamond-open"}
DOT_PX = 11
MARGIN = 1.6  # room beside the outermost dot, a factor on a log axis


@dataclass(frozen=True, slots=True)
class Dot:
    """One product; rates in FLOP/s at the median and the quartiles of its times."""

    intensity: float
    flops_s: float
    low_flops_s: float
    high_flops_s: float
    dtype: str
    verdict: str
    lines: tuple[str, ...]  # of the hover box, as plain text; the first is bold


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A flat line."""

    dtype: str
    flops_s: float


def unit(dots: Sequence[Dot], ceilings: Sequence[Ceiling]) -> tuple[str, float]:
    """(name, FLOP/s) of the y axis, by the highest that is drawn."""
    highest = max([d.flops_s for d in dots] + [c.flops_s for c in ceilings], default=0.0)
    return ("TFLOP/s", 1e12) if highest >= 1e12 else ("GFLOP/s", 1e9)


def roofline(dots: Sequence[Dot], ceilings: Sequence[Ceiling], bytes_s: float | None) -> go.Figure:
    """``bytes_s`` of a copy is the slope on the left; None leaves it out."""
    figure = go.Figure()
    name, scale = unit(dots, ceilings)
    first, last = _range(dots, ceilings, bytes_s)
    for ceiling in sorted(ceilings, key=lambda c: -c.flops_s):
        start = max(first, ceiling.flops_s / bytes_s) if bytes_s else first
        _add_line(figure, ceiling, start, last, name, scale)
    if bytes_s and ceilings:
        end = max(c.flops_s for c in ceilings) / bytes_s
        _add_slope(figure, bytes_s, first, end, scale)
    for dtype, verdict in sorted({(d.dtype, d.verdict) for d in dots}):
        of = [d for d in dots if (d.dtype, d.verdict) == (dtype, verdict)]
        figure.add_trace(_dots(of, dtype, verdict, scale))
    figure.update_layout(
        height=HEIGHT_PX,
        margin={"t": 60, "b": 50, "l": 10, "r": 10},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hovermode="closest",
        xaxis={"title": {"text": "FLOP for each byte moved"}},
        yaxis={"title": {"text": f"{name} reached"}},
    )
    # Labels at 1, 2 and 5 of every decade
    figure.update_xaxes(type="log", tickformat="~g", dtick="D2")
    figure.update_yaxes(type="log", tickformat="~g", dtick="D2")
    return figure


def _dots(dots: Sequence[Dot], dtype: str, verdict: str, scale: float) -> go.Scatter:
    color = dtype_color(dtype)
    return go.Scatter(
        name=for_plotly(f"{dtype}, {verdict}"),
        mode="markers",
        x=[d.intensity for d in dots],
        y=[d.flops_s / scale for d in dots],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [(d.high_flops_s - d.flops_s) / scale for d in dots],
            "arrayminus": [(d.flops_s - d.low_flops_s) / scale for d in dots],
            "color": color,
            "thickness": 1.5,
            "width": 4,
        },
        marker={
            "symbol": SYMBOLS[verdict],
            "size": DOT_PX,
            "color": color,
            "line": {"color": color if verdict == "unknown" else OUTLINE, "width": 1.5},
        },
        hovertext=[_hover(d.lines) for d in dots],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def _hover(lines: Sequence[str]) -> str:
    first, *rest = (for_plotly(line) for line in lines)
    return "<br>".join([f"<b>{first}</b>", *rest])


def _add_line(
    figure: go.Figure, ceiling: Ceiling, start: float, end: float, name: str, scale: float
) -> None:
    height = ceiling.flops_s / scale
    figure.add_trace(
        go.Scatter(
            mode="lines",
            x=[start, end],
            y=[height, height],
            line={"color": dtype_color(ceiling.dtype), "width": 2},
            hoverinfo="skip",
            showlegend=False,
        )
    )
    figure.add_annotation(
        text=f"{for_plotly(ceiling.dtype)}, largest product: {height:.3g} {name}",
        x=math.log10(end),  # a log axis takes exponents here
        y=math.log10(height),
        xanchor="right",
        yanchor="bottom",
        showarrow=False,
    )


def _add_slope(figure: go.Figure, bytes_s: float, start: float, end: float, scale: float) -> None:
    figure.add_trace(
        go.Scatter(
            name=f"as fast as a copy moves its bytes ({bytes_s / 1e9:.3g} GB/s)",
            mode="lines",
            x=[start, end],
            y=[bytes_s * start / scale, bytes_s * end / scale],
            line={"color": OUTLINE, "width": 2, "dash": "dash"},
            hoverinfo="skip",
        )
    )


def _range(
    dots: Sequence[Dot], ceilings: Sequence[Ceiling], bytes_s: float | None
) -> tuple[float, float]:
    """Of the x axis: all dots, and the point from which arithmetic and not memory limits."""
    found = [d.intensity for d in dots]
    if bytes_s:
        found += [c.flops_s / bytes_s for c in ceilings]
    return min(found, default=1.0) / MARGIN, max(found, default=1000.0) * MARGIN
