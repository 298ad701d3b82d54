"""Underflow of many modules over time: one row a module, one column a step that has a shadow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from ampscope.analysis.underflow import Counts

from app.palette import OUTLINE
from app.text import for_plotly

FAINTEST = -6.0  # log10 of the share with the faintest colour
ROW_PX, MIN_PLOT_PX, TOP, BOTTOM = 18, 120, 20, 56


def underflow_map(
    counts: Counts,
    totals: Counts,
    steps: Sequence[int],
    ticks: Sequence[str],
    names: Sequence[str],
    color: str,
) -> go.Figure:
    """``counts`` and ``totals`` are [modules, steps]; a cell without a shadow stays empty, one with
    a count of zero is outlined grey."""
    share = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    strength = np.full(counts.shape, np.nan)
    np.log10(share, out=strength, where=share > 0)
    texts = [
        [
            f"<b>{for_plotly(name)}</b><br>step {step}: {n:,} of {t:,}, {100 * n / t:.3g} %"
            if t
            else ""
            for step, n, t in zip(steps, row, whole, strict=True)
        ]
        for name, row, whole in zip(names, counts.tolist(), totals.tolist(), strict=True)
    ]
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    figure = go.Figure()
    figure.add_trace(_known_zeros(counts, totals, texts))
    figure.add_trace(
        go.Heatmap(
            z=strength.astype(np.float32),
            x=np.arange(len(steps)),
            y=np.arange(len(names)),
            zmin=FAINTEST,
            zmax=0,
            colorscale=[[0, f"rgba({r},{g},{b},0.25)"], [1, f"rgba({r},{g},{b},1)"]],
            hovertext=texts,
            hovertemplate="%{hovertext}<extra></extra>",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            colorbar={
                "title": {"text": "share of<br>elements"},
                "tickvals": [0, -2, -4, -6],
                "ticktext": ["100 %", "1 %", "0.01 %", "≤ 1 ppm"],
                "thickness": 10,
                "outlinewidth": 0.5,
                "outlinecolor": OUTLINE,
            },
        )
    )
    _lay_out(figure, steps, ticks)
    return figure


def _known_zeros(counts: Counts, totals: Counts, texts: list[list[str]]) -> go.Heatmap:
    """A shadow was taken and counted none: pale grey, unlike the gap of no shadow."""
    none = np.where((totals > 0) & (counts == 0), 1.0, np.nan)
    grey = "rgba(118,128,142,0.14)"
    return go.Heatmap(
        z=none,
        x=np.arange(counts.shape[1]),
        y=np.arange(counts.shape[0]),
        colorscale=[[0, grey], [1, grey]],
        showscale=False,
        hovertext=texts,
        hovertemplate="%{hovertext}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )


def _lay_out(figure: go.Figure, steps: Sequence[int], ticks: Sequence[str]) -> None:
    every = max(1, len(steps) // 12)
    places = list(range(0, len(steps), every))
    figure.update_layout(
        height=max(MIN_PLOT_PX, ROW_PX * len(ticks)) + TOP + BOTTOM,
        margin={"t": TOP, "b": BOTTOM, "l": 10, "r": 10},
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis={
            "title": {"text": "step with a shadow"},
            "tickvals": places,
            "ticktext": [str(steps[i]) for i in places],
            "showgrid": False,
        },
        yaxis={
            "range": [len(ticks) - 0.5, -0.5],
            "tickvals": list(range(len(ticks))),
            "ticktext": [for_plotly(t) for t in ticks],
            "showgrid": False,
            "automargin": True,
            "title": {"text": "module"},
        },
    )
