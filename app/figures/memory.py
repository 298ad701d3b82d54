"""Memory at the peak of a step as bars, by what it is for.

Parts of a bar differ by pattern as well as by shade, because all of a bar has its dtype's colour.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.number_words import binary_size
from ampscope.records import MemorySplit
from ampscope.story.palette import OUTLINE, dtype_color
from app.figures import ABOVE
from app.text import for_plotly

ROW_PX, EDGE_PX = 46, 100
MIB = 2**20
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


def memory_bars(splits: Sequence[MemorySplit]) -> go.Figure:
    """MiB of tensors when a step needs most; a mark where the allocator's own peak is known."""
    figure = go.Figure()
    names = [split.precision for split in splits]
    for field, words, pattern in PARTS:
        values = [getattr(split, field) / MIB for split in splits]
        if any(values):
            add_bars(figure, words, pattern, names, values, "MiB")
    peaks = [(split.precision, split.device_peak) for split in splits if split.device_peak]
    if peaks:
        figure.add_scatter(
            x=[peak / MIB for _, peak in peaks],
            y=[for_plotly(name) for name, _ in peaks],
            mode="markers",
            marker={"symbol": "diamond", "size": 10, "color": OUTLINE},
            name="the allocator's peak",
            hovertemplate="%{y}: %{x:,.1f} MiB with workspaces<extra></extra>",
        )
    return stacked(figure, len(splits), "memory at the peak of a step (MiB)")


def add_bars(
    figure: go.Figure,
    name: str,
    pattern: str,
    precisions: Sequence[str],
    values: Sequence[float | None],
    unit: str,
) -> None:
    """One part of every precision's bar, in the colours of their dtypes."""
    figure.add_bar(
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


def stacked(figure: go.Figure, rows: int, title: str) -> go.Figure:
    """``figure``, laid out as ``rows`` bars, the first on top."""
    figure.update_layout(
        barmode="stack",
        height=ROW_PX * rows + EDGE_PX,
        margin={"t": 40, "b": 46, "l": 10, "r": 10},
        legend=ABOVE,
        xaxis={"title": title, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "type": "category"},
    )
    return figure


def memory_words(split: MemorySplit) -> str:
    """ "120 MiB activations, 37 MiB optimizer state, 21 MiB cast copies": the three largest."""
    parts = sorted(((getattr(split, f), words) for f, words, _ in PARTS), reverse=True)
    return ", ".join(f"{binary_size(count)} {words}" for count, words in parts[:3] if count)
