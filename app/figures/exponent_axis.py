"""The x axis of every exponent chart: powers of two, a format's limits as labelled lines, and its
four zones as a coloured band above the plot.

x is log2 of the magnitude. The bin of exponent e covers [e, e + 1) and is drawn round e + CENTRE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import plotly.graph_objects as go
from ampscope.formats import NumberFormat

from app.palette import OUTLINE, ZONES

ZONE_TEXT = {
    "lost": "lost",
    "subnormal": "subnormal",
    "normal": "normal",
    "overflow": "overflow",
}
MARGIN_BINS = 5  # room beside the outermost limit: the words "lost" and "overflow" fit in it
CENTRE = 0.49  # not 0.5, so that a hover box's %{x:.0f} rounds to the exponent
LABEL_SIZE, NAME_SIZE = 13, 12  # names of modules need the width
MIN_LABEL_SHARE = 0.06  # a zone narrower than this has no room for its name
BAND_PX = (4, 12)  # of the zone band above the plot
TOP_PX = 92  # margin that the band and the lines of text above it need
LIMIT_LABEL_PX = 57  # the highest line: the limits
# Neighbouring zones on two lines, so that their names stay apart in a narrow chart.
ZONE_LABEL_PX = {"lost": 21, "subnormal": 38, "normal": 21, "overflow": 38}


@dataclass(frozen=True, slots=True)
class ExponentRange:
    """Exponents shown, both ends included."""

    lowest: int
    highest: int

    @property
    def width(self) -> int:
        return self.highest - self.lowest + 1


def exponent_range(occupied: tuple[int, int] | None, fmt: NumberFormat) -> ExponentRange:
    """Wide enough for the data and for every limit of the format."""
    low, high = fmt.zero_below_exponent - MARGIN_BINS, fmt.max_exponent + MARGIN_BINS
    if occupied is not None:
        low, high = min(low, occupied[0] - 1), max(high, occupied[1] + 1)
    return ExponentRange(low, high)


def zone_spans(fmt: NumberFormat, shown: ExponentRange) -> list[tuple[str, int, int]]:
    """(zone, first exponent, exponent after the last) from left to right within ``shown``."""
    edges = (
        shown.lowest,
        fmt.zero_below_exponent,
        fmt.min_normal_exponent,
        fmt.max_exponent + 1,
        shown.highest + 1,
    )
    return list(zip(ZONE_TEXT, edges[:-1], edges[1:], strict=True))


def power(exponent: int) -> str:
    """Plotly markup of a power of two."""
    return f"2<sup>{str(exponent).replace('-', '−')}</sup>"


def set_exponent_axis(
    figure: go.Figure, fmt: NumberFormat, shown: ExponentRange, axis: str, title: str
) -> None:
    """Ticks, title, limit lines and zone band on ``axis`` (``"x2"``) of ``figure``."""
    figure.update_layout(
        {
            axis.replace("x", "xaxis"): {
                "title": {"text": title},
                "range": [shown.lowest, shown.highest + 1],
                "tickprefix": "2<sup>",
                "ticksuffix": "</sup>",
                "tickangle": 0,
                "tickfont": {"size": LABEL_SIZE},
                "showgrid": False,
                "zeroline": False,
            }
        }
    )
    _draw_limits(figure, fmt, axis)
    _draw_zones(figure, fmt, shown, axis)


def _draw_limits(figure: go.Figure, fmt: NumberFormat, axis: str) -> None:
    limits = (
        (
            fmt.min_subnormal_exponent,
            "right",
            f"min subnormal {power(fmt.min_subnormal_exponent)} ",
        ),
        (fmt.min_normal_exponent, "left", f" min normal {power(fmt.min_normal_exponent)}"),
        (math.log2(fmt.max), "left", f" max {_largest(fmt)}"),
    )
    for x, side, text in limits:
        figure.add_shape(
            type="line",
            xref=axis,
            yref="paper",
            x0=x,
            x1=x,
            y0=0,
            y1=1,
            line={"color": OUTLINE, "width": 1.5, "dash": "dash"},
        )
        figure.add_annotation(
            xref=axis,
            yref="paper",
            x=x,
            y=1,
            yshift=LIMIT_LABEL_PX,
            text=text,
            showarrow=False,
            xanchor=side,
            yanchor="middle",
            font={"size": LABEL_SIZE},
        )


def _largest(fmt: NumberFormat) -> str:
    return f"{fmt.max:,.0f}" if fmt.max < 1e6 else f"{fmt.max:.2e}"


def _draw_zones(figure: go.Figure, fmt: NumberFormat, shown: ExponentRange, axis: str) -> None:
    for zone, first, end in zone_spans(fmt, shown):
        if end <= first:
            continue
        figure.add_shape(
            type="rect",
            xref=axis,
            yref="paper",
            x0=first,
            x1=end,
            ysizemode="pixel",
            yanchor=1,
            y0=BAND_PX[0],
            y1=BAND_PX[1],
            fillcolor=ZONES[zone],
            line={"color": OUTLINE, "width": 0.5},
        )
        if (end - first) / shown.width >= MIN_LABEL_SHARE:
            figure.add_annotation(
                xref=axis,
                yref="paper",
                x=(first + end) / 2,
                y=1,
                yshift=ZONE_LABEL_PX[zone],
                text=f"<b>{ZONE_TEXT[zone]}</b>",
                showarrow=False,
                yanchor="middle",
                font={"size": LABEL_SIZE},
            )
