"""Underflow of many modules over time: one row a module, one column a step that has a shadow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from ampscope.analysis.underflow import Counts
from app.figures.exponent_axis import NAME_SIZE, Part
from app.figures.strength import SHARE_BAR, SHARE_BAR_PX, STRONGEST, WEAKEST, fade, log_share
from app.text import for_plotly

ROW_PX, MIN_PLOT_PX, TOP, BOTTOM = 18, 120, 20, 56 + SHARE_BAR_PX


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
    texts = [
        [
            f"<b>{for_plotly(name)}</b><br>step {step}: {n:,} of {t:,}, {100 * n / t:.3g} %"
            if t
            else ""
            for step, n, t in zip(steps, row, whole, strict=True)
        ]
        for name, row, whole in zip(names, counts.tolist(), totals.tolist(), strict=True)
    ]
    hits = go.Heatmap(
        z=log_share(counts, totals),
        x=np.arange(len(steps)),
        y=np.arange(len(names)),
        zmin=WEAKEST,
        zmax=STRONGEST,
        colorscale=fade(color),
        hovertext=texts,
        hovertemplate="%{hovertext}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
        colorbar=SHARE_BAR,
    )
    return go.Figure([_known_zeros(counts, totals, texts), hits], _layout(steps, ticks))


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


def _layout(steps: Sequence[int], ticks: Sequence[str]) -> Part:
    every = max(1, len(steps) // 12)
    places = list(range(0, len(steps), every))
    return {
        "height": max(MIN_PLOT_PX, ROW_PX * len(ticks)) + TOP + BOTTOM,
        "margin": {"t": TOP, "b": BOTTOM, "l": 10, "r": 10},
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {
            "title": {"text": "step with a shadow"},
            "tickvals": places,
            "ticktext": [str(steps[i]) for i in places],
            "showgrid": False,
        },
        "yaxis": {
            "range": [len(ticks) - 0.5, -0.5],
            "tickvals": list(range(len(ticks))),
            "ticktext": [for_plotly(t) for t in ticks],
            "showgrid": False,
            "automargin": True,
            "tickfont": {"size": NAME_SIZE},
            "title": {"text": "module"},
        },
    }
