"""Underflow over time, at the steps that have a shadow: of many modules one count as a heat map, of
one module its counts, a panel each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ampscope.analysis.underflow import Counts
from ampscope.story.palette import LOST, MEASURE, OUTLINE, SUBNORMAL, ZERO
from app.figures import exponents
from app.text import for_plotly

ROW_PX, MIN_PLOT_PX, TOP, BOTTOM = 18, 120, 20, 56 + exponents.SHARE_BAR_PX
BELOW = ("below_range", LOST, "lost, below the format's range: underflow")
CANCELLED = ("cancelled", MEASURE, "lost, cancelled or flipped: rounding")
SUBNORMALS = ("subnormal", SUBNORMAL, "subnormal: kept with fewer bits")
ZEROS = ("zero_before", ZERO, "was zero already, in both")
PANELS = (BELOW, CANCELLED, SUBNORMALS, ZEROS)
PANEL_PX = 150


def underflow_map(
    counts: Counts,
    totals: Counts,
    steps: Sequence[int],
    ticks: Sequence[str],
    names: Sequence[str],
    color: str,
) -> go.Figure:
    """One row per module, one column per step; ``counts`` and ``totals`` are [modules, steps]. A
    cell without a shadow stays empty, one with
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
        z=exponents.log_share(counts, totals),
        x=np.arange(len(steps)),
        y=np.arange(len(names)),
        zmin=exponents.WEAKEST,
        zmax=exponents.STRONGEST,
        colorscale=exponents.fade(color),
        hovertext=texts,
        hovertemplate="%{hovertext}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
        colorbar=exponents.SHARE_BAR,
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


def _layout(steps: Sequence[int], ticks: Sequence[str]) -> exponents.Part:
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
            "tickfont": {"size": exponents.NAME_SIZE},
            "title": {"text": "module"},
        },
    }


@dataclass(frozen=True, slots=True)
class ShadowCounts:
    """Counts of one kind at the steps that have a shadow."""

    steps: Sequence[int]
    counts: Sequence[int]
    totals: Sequence[int]


def underflow_lines(lines: dict[str, ShadowCounts]) -> go.Figure:
    """``lines`` by the names in PANELS; y is the share of the module's elements in percent. Panels
    and not lines in one: the shares differ by orders of magnitude, and each has its own meaning."""
    figure = make_subplots(
        rows=len(PANELS),
        shared_xaxes=True,
        vertical_spacing=0.09,
        subplot_titles=[title for _, _, title in PANELS],
    )
    for row, (name, color, _) in enumerate(PANELS, start=1):
        line = lines[name]
        shares = [100 * n / t if t else None for n, t in zip(line.counts, line.totals, strict=True)]
        figure.add_scatter(
            x=list(line.steps),
            y=shares,
            mode="lines+markers",
            line={"color": color, "width": 2},
            marker={"size": 9, "color": color, "line": {"color": OUTLINE, "width": 1}},
            text=[f"{n:,} of {t:,}" for n, t in zip(line.counts, line.totals, strict=True)],
            hovertemplate="step %{x}<br>%{text}, %{y:.3g} %<extra></extra>",
            showlegend=False,
            row=row,
            col=1,
        )
        top = max((s for s in shares if s is not None), default=0.0)
        figure.update_yaxes(
            row=row, col=1, title="% of elements", range=[-0.06 * (top or 1), 1.15 * (top or 1)]
        )
    figure.update_xaxes(title="step", row=len(PANELS), col=1)
    figure.update_layout(height=PANEL_PX * len(PANELS), margin={"t": 36, "b": 50, "l": 10, "r": 10})
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    return figure
