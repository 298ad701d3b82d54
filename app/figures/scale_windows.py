"""Which loss scales suit each module, as bars over powers of two, and what suits all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from ampscope.analysis.scale_window import ModuleWindow
from app.palette import LOST, MEASURE, NORMAL, OUTLINE, OVERFLOW
from app.text import cut, for_plotly

ROW_PX, EDGE_PX, MOST_PX = 20, 110, 900
NAME_LENGTH = 36


def scale_windows(
    windows: Sequence[ModuleWindow], names: Mapping[int, str], scale: float | None
) -> go.Figure:
    """A bar a module, from the lowest to the highest scale; a cross where there is none between.
    The green band suits all; ``scale`` (log2) is what the step used."""
    labels = [for_plotly(cut(names.get(w.module, "?"), NAME_LENGTH)) for w in windows]
    rows = list(range(len(windows)))
    figure = go.Figure()
    held = [w.low <= w.high for w in windows]
    figure.add_trace(
        go.Bar(
            y=[r for r, ok in zip(rows, held, strict=True) if ok],
            x=[w.high - w.low for w, ok in zip(windows, held, strict=True) if ok],
            base=[w.low for w, ok in zip(windows, held, strict=True) if ok],
            orientation="h",
            marker={"color": MEASURE, "line": {"color": OUTLINE, "width": 1}},
            name="scales that suit it",
            customdata=[
                (label, w.low, w.high)
                for w, ok, label in zip(windows, held, labels, strict=True)
                if ok
            ],
            hovertemplate="%{customdata[0]}: 2^%{customdata[1]} to 2^%{customdata[2]}"
            "<extra></extra>",
        )
    )
    broken = [(r, w, n) for r, w, n, ok in zip(rows, windows, labels, held, strict=True) if not ok]
    if broken:
        figure.add_trace(
            go.Scatter(
                y=[r for r, _, _ in broken],
                x=[(w.low + w.high) / 2 for _, w, _ in broken],
                mode="markers",
                marker={"symbol": "x", "size": 9, "color": OVERFLOW},
                name="no scale suits it",
                text=[n for _, _, n in broken],
                hovertemplate="%{text}: it spans more powers of two than the format<extra></extra>",
            )
        )
    low, high = max(w.low for w in windows), min(w.high for w in windows)
    if low <= high:
        figure.add_vrect(x0=low, x1=high, fillcolor=NORMAL, opacity=0.25, line_width=0)
    if scale is not None:
        figure.add_vline(x=scale, line={"color": LOST, "width": 2, "dash": "dash"})
    figure.update_layout(
        height=min(ROW_PX * len(windows) + EDGE_PX, MOST_PX),
        margin={"t": 40, "b": 46, "l": 10, "r": 10},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        xaxis={"title": "loss scale", "tickprefix": "2^"},
        yaxis={
            "tickvals": rows,
            "ticktext": labels,
            "autorange": "reversed",
            "showticklabels": len(windows) * ROW_PX <= MOST_PX,
        },
    )
    return figure
