"""Lines of a lesson's chart: each with a colour, a marker and a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from app.figures.kept import kept
from app.palette import OUTLINE

HEIGHT_PX = 380
DASHES = {"solid": "solid", "dash": "dash", "dot": "dot"}


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. Shape of marker and dash tell it apart where colours do not."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    symbol: str = "circle"
    dash: str = "solid"
    is_stepped: bool = False
    has_markers: bool = True


@kept
def lines(
    curves: Sequence[Line],
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
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        xaxis={"title": {"text": x_title}, "type": "log" if x_log else "linear", "showgrid": False,
               **(power if x_power else {})},
        yaxis={"title": {"text": y_title}, "type": "log" if y_log else "linear",
               **(power if y_power else {}), **({"tickformat": ".0%"} if y_percent else {})},
    )  # fmt: skip
    if mark is not None:
        figure.add_vline(x=mark, line={"color": OUTLINE, "width": 2, "dash": "dash"})
    return figure


def _trace(curve: Line) -> go.Scatter:
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
