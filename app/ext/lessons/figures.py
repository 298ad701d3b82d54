"""Lines of a lesson's chart: each with a colour, a marker and a name of its own; stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from ampscope.story.palette import OUTLINE
from app.figures import ABOVE
from app.figures.cache import cached_figure

HEIGHT_PX = 380
# One marker per format, in all lessons.
SYMBOLS = {"fp32": "circle", "tf32": "diamond", "bf16": "triangle-up", "fp16": "triangle-down",
           "e4m3": "star", "e5m2": "square"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trace:
    """One curve. Shape of marker and dash distinguishes it where colours do not."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    symbol: str = "circle"
    dash: str = "solid"
    is_stepped: bool = False
    has_markers: bool = True


@cached_figure
def lines(
    curves: Sequence[Trace],
    *,
    x_title: str,
    y_title: str,
    x_power: bool = False,
    y_power: bool = False,
    y_percent: bool = False,
    x_log: bool = False,
    y_log: bool = False,
    mark: float | None = None,
) -> go.Figure:
    """``x_power`` and ``y_power``: the numbers are exponents of two. ``mark`` is the x that a
    control has chosen."""
    figure = go.Figure([_trace(curve) for curve in curves])
    power = {"tickprefix": "2<sup>", "ticksuffix": "</sup>"}
    figure.update_layout(
        height=HEIGHT_PX,
        margin={"t": 40, "b": 56, "l": 10, "r": 16},
        legend=ABOVE,
        xaxis={"title": {"text": x_title}, "type": "log" if x_log else "linear", "showgrid": False,
               **(power if x_power else {})},
        yaxis={"title": {"text": y_title}, "type": "log" if y_log else "linear",
               **(power if y_power else {}), **({"tickformat": ".0%"} if y_percent else {})},
    )  # fmt: skip
    if mark is not None:
        figure.add_vline(x=mark, line={"color": OUTLINE, "width": 2, "dash": "dash"})
    return figure


def _trace(curve: Trace) -> go.Scatter:
    return go.Scatter(
        name=curve.name,
        x=list(curve.x),
        y=list(curve.y),
        mode="lines+markers" if curve.has_markers else "lines",
        line={"color": curve.color, "width": 2.5, "dash": curve.dash,
              "shape": "hv" if curve.is_stepped else "linear"},
        marker={"symbol": curve.symbol, "size": 8},
        connectgaps=False,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bars:
    """One part of stacked bars: a number per place; ``color`` may be one per place too."""

    name: str
    x: Sequence[float]
    color: str | Sequence[str]
    pattern: str  # distinguishes the part where colours do not
    hover: Sequence[str] | None = None


def stacked_bars(
    places: Sequence[str],
    parts: Sequence[Bars],
    *,
    x_title: str,
    height: int,
    x_percent: bool = False,
) -> go.Figure:
    """A bar per place, the first at the top."""
    figure = go.Figure(
        [
            go.Bar(
                name=part.name, y=list(places), x=list(part.x), orientation="h",
                marker={"color": part.color, "pattern": {"shape": part.pattern}},
                hovertext=part.hover,
                hovertemplate="%{y}: %{hovertext}<extra></extra>" if part.hover else None,
            )
            for part in parts
        ]
    )  # fmt: skip
    figure.update_layout(
        barmode="stack", height=height, margin={"t": 40, "b": 50, "l": 10, "r": 10},
        legend=ABOVE,
        xaxis={"title": {"text": x_title}, **({"tickformat": ".0%"} if x_percent else {})},
        yaxis={"autorange": "reversed"},
    )  # fmt: skip
    return figure
