"""The x axis of every exponent chart: powers of two, a format's limits as labelled lines, and its
four zones as a coloured band above the plot.

x is log2 of the magnitude. The bin of exponent e covers [e, e + 1) and is drawn round e + CENTRE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.exponent_zones import ExponentRange, zone_spans
from ampscope.formats import NumberFormat
from app.palette import OUTLINE, ZONES

CENTRE = 0.49  # not 0.5, so that a hover box's %{x:.0f} rounds to the exponent
LABEL_SIZE, NAME_SIZE = 13, 12  # names of modules need the width
MIN_LABEL_SHARE = 0.06  # a zone narrower than this has no room for its name
BAND_PX = (4, 12)  # of the zone band above the plot
TOP_PX = 92  # margin that the band and the lines of text above it need
LIMIT_LABEL_PX = 57  # the highest line: the limits
# Neighbouring zones on two lines, so that their names stay apart in a narrow chart.
ZONE_LABEL_PX = {"lost": 21, "subnormal": 38, "normal": 21, "overflow": 38}


Part = dict[str, object]  # of a Plotly layout


@dataclass(frozen=True, slots=True)
class ExponentAxis:
    """Parts of a layout that belong to one axis of exponents."""

    axis: Part
    shapes: list[Part]
    annotations: list[Part]


def power(exponent: int) -> str:
    """Plotly markup of a power of two."""
    return f"2<sup>{str(exponent).replace('-', '−')}</sup>"


def exponent_axis(fmt: NumberFormat, shown: ExponentRange, ref: str, title: str) -> ExponentAxis:
    """Axis ``ref`` (``"x2"``) with limit lines and zone band. Parts of a layout and not changes of
    a figure, because Plotly takes 5 ms for each shape that is added to one."""
    spans = [span for span in zone_spans(fmt, shown) if span[2] > span[1]]
    limits = _limits(fmt)
    wide = [s for s in spans if (s[2] - s[1]) / shown.width >= MIN_LABEL_SHARE]
    return ExponentAxis(
        axis={
            "title": {"text": title},
            "range": [shown.lowest, shown.highest + 1],
            "tickprefix": "2<sup>",
            "ticksuffix": "</sup>",
            "tickangle": 0,
            "tickfont": {"size": LABEL_SIZE},
            "showgrid": False,
            "zeroline": False,
        },
        shapes=[
            *(_limit_line(ref, x) for x, _, _ in limits),
            *(_zone_band(ref, *span) for span in spans),
        ],
        annotations=[
            *(_label(ref, x, LIMIT_LABEL_PX, text, side) for x, side, text in limits),
            *(
                _label(ref, (first + end) / 2, ZONE_LABEL_PX[zone], f"<b>{zone}</b>", "center")
                for zone, first, end in wide
            ),
        ],
    )


def _limits(fmt: NumberFormat) -> tuple[tuple[float, str, str], ...]:
    """(place, side of the line that the text keeps to, text)."""
    subnormal, normal = fmt.min_subnormal_exponent, fmt.min_normal_exponent
    largest = f"{fmt.max:,.0f}" if fmt.max < 1e6 else f"{fmt.max:.1e}"
    return (
        (subnormal, "right", f"min subnormal {power(subnormal)} "),
        (normal, "left", f" min normal {power(normal)}"),
        (math.log2(fmt.max), "left", f" max {largest}"),
    )


def _limit_line(ref: str, x: float) -> Part:
    line = {"color": OUTLINE, "width": 1.5, "dash": "dash"}
    place = {"x0": x, "x1": x, "y0": 0, "y1": 1}
    return {"type": "line", "xref": ref, "yref": "paper", "line": line, **place}


def _zone_band(ref: str, zone: str, first: int, end: int) -> Part:
    return {
        "type": "rect",
        "xref": ref,
        "yref": "paper",
        "x0": first,
        "x1": end,
        "ysizemode": "pixel",
        "yanchor": 1,
        "y0": BAND_PX[0],
        "y1": BAND_PX[1],
        "fillcolor": ZONES[zone],
        "line": {"color": OUTLINE, "width": 0.5},
    }


def _label(ref: str, x: float, height_px: int, text: str, side: str) -> Part:
    return {
        "xref": ref,
        "yref": "paper",
        "x": x,
        "y": 1,
        "yshift": height_px,
        "text": text,
        "showarrow": False,
        "xanchor": side,
        "yanchor": "middle",
        "font": {"size": LABEL_SIZE},
    }
