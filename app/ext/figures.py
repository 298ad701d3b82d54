"""Charts of extensions' pages, built without Streamlit: one layer's histogram in several
frameworks, a line each over powers of two."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from ampscope.ext.frameworks.differences import LOWEST, LayerSeen
from ampscope.numerics.formats import NumberFormat
from ampscope.numerics.histogram import exponent_range
from ampscope.story.palette import DTYPES, MEASURE, OUTLINE
from app.figures.exponents import TOP_PX, exponent_axis
from app.text import for_plotly, power

# The second and third hue are those of dtypes that no run here has; dash and marker tell the lines
# apart without colour.
STYLES = {
    "PyTorch": (MEASURE, "solid", "circle"),
    "Keras": (DTYPES["tf32"], "dash", "square"),
    "Paddle": (DTYPES["e4m3"], "dot", "diamond"),
}
HEIGHT_PX = 420


def framework_lines(seen: Mapping[str, LayerSeen], fmt: NumberFormat, *, x_title: str) -> go.Figure:
    """``seen`` by framework; y is the share of the layer's elements in a power of two."""
    occupied = [np.flatnonzero(layer.counts[:-2]) + LOWEST for layer in seen.values()]
    found = np.concatenate(occupied) if occupied else np.array([], np.int64)
    span = (int(found.min()), int(found.max())) if found.size else None
    shown = exponent_range(span, fmt)
    axis = exponent_axis(fmt, shown, "x", x_title)
    exponents = np.arange(shown.lowest, shown.highest + 1)
    traces = [_line(name, layer, exponents) for name, layer in seen.items()]
    return go.Figure(
        traces,
        {
            "shapes": axis.shapes,
            "annotations": axis.annotations,
            "height": HEIGHT_PX,
            "margin": {"t": TOP_PX, "b": 64, "l": 10, "r": 24},
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": axis.axis,
            "yaxis": {"title": {"text": "share of the elements (%)"}, "rangemode": "tozero"},
            "legend": {"orientation": "h", "y": -0.22},
        },
    )


def _line(name: str, layer: LayerSeen, exponents: np.ndarray) -> go.Scatter:
    color, dash, symbol = STYLES.get(name, (OUTLINE, "solid", "x"))
    share = 100 * layer.counts[exponents - LOWEST] / max(layer.total, 1)
    return go.Scatter(
        name=for_plotly(f"{name} ({layer.dtype})"),
        x=exponents + 0.5,
        y=share,
        mode="lines+markers",
        line={"color": color, "dash": dash, "width": 2, "shape": "hvh"},
        marker={"symbol": symbol, "size": 5},
        hovertext=[
            f"{for_plotly(name)}: {power(e)}, {s:.3g} %"
            for e, s in zip(exponents, share, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
