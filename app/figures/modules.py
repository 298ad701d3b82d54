"""The chain of a diagnosis as boxes from top to bottom, joined by arrows.

Boxes take the whole width and grow with their text, so the chain reads at 400 pixels and at 1,600.
A box with NaN or Inf in it has their colour at its edge, and says so.

Also here: the FLOPs of each module as bars, split by dtype.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from ampscope.analysis.precision_use import FlopShare
from ampscope.report.palette import MEASURE, NONFINITE, OUTLINE, dtype_color, text_on
from ampscope.report.verdict_words import Link
from app.figures import ABOVE
from app.figures.exponents import NAME_SIZE
from app.text import for_plotly

LINE_CHARACTERS, TITLE_CHARACTERS = 48, 42  # fit a page of 390 px at 13 px; titles are bold
MAX_LINES = 3
LINE_PX, PADDING_PX, GAP_PX = 19, 8, 22
TEXT_LIGHT, TEXT_DARK = (
    "#1B2430",
    "#E6EAF0",
)  # the themes' own; Plotly's default is too pale to read
EDGE = 0.006  # of the width: the coloured edge at the left of a box


def cause_chain(links: Sequence[Link], *, is_dark: bool = False) -> go.Figure:
    """``links`` from cause to symptom."""
    figure = go.Figure()
    texts = [_lines(link) for link in links]
    heights = [len(t) * LINE_PX + 2 * PADDING_PX for t in texts]
    total = sum(heights) + GAP_PX * max(0, len(links) - 1)
    top = float(total)
    for n, (link, lines, height) in enumerate(zip(links, texts, heights, strict=True)):
        _box(figure, link, lines, top, height)
        if n + 1 < len(links):
            _arrow(figure, top - height)
        top -= height + GAP_PX
    figure.update_layout(
        height=total + 4,
        margin={"t": 2, "b": 2, "l": 2, "r": 2},
        showlegend=False,
        hovermode="closest",
    )
    figure.update_annotations(font={"size": 13, "color": TEXT_DARK if is_dark else TEXT_LIGHT})
    figure.update_xaxes(visible=False, range=[0, 1], fixedrange=True)
    figure.update_yaxes(visible=False, range=[0, total], fixedrange=True)
    return figure


def _lines(link: Link) -> list[str]:
    """The title in bold and the detail, cut to :data:`MAX_LINES`; hovering shows all of it."""
    title = textwrap.wrap(link.title, TITLE_CHARACTERS)[:MAX_LINES]
    detail = textwrap.wrap(link.detail, LINE_CHARACTERS)
    if len(detail) > MAX_LINES:
        detail = [*detail[: MAX_LINES - 1], detail[MAX_LINES - 1][: LINE_CHARACTERS - 1] + "…"]
    return [*(f"<b>{for_plotly(t)}</b>" for t in title), *map(for_plotly, detail)]


def _box(figure: go.Figure, link: Link, lines: list[str], top: float, height: float) -> None:
    edge = NONFINITE if link.is_nonfinite else MEASURE if link.is_root else OUTLINE
    line = {"color": OUTLINE, "width": 2 if link.is_root else 1}
    span: dict[str, Any] = {"y0": top - height, "y1": top}
    figure.add_shape(type="rect", x0=0, x1=1, line=line, **span)
    figure.add_shape(
        type="rect", x0=0, x1=EDGE, line={"width": 0}, fillcolor=edge, layer="below", **span
    )
    figure.add_annotation(
        x=2.5 * EDGE,
        y=top - height / 2,
        text="<br>".join(lines),
        hovertext=for_plotly(f"{link.title}: {link.detail}"),
        showarrow=False,
        xanchor="left",
        yanchor="middle",
        align="left",
    )


def _arrow(figure: go.Figure, bottom: float) -> None:
    figure.add_annotation(
        x=0.05,
        y=bottom - GAP_PX,
        ax=0.05,
        ay=bottom,
        xref="x",
        yref="y",
        axref="x",
        ayref="y",
        text="",
        showarrow=True,
        arrowhead=2,
        arrowwidth=1.5,
        arrowcolor=OUTLINE,
    )


# Where the FLOPs are: one bar per module, split by the dtype in which they ran.


ROW_PX, TOP, BOTTOM = 24, 40, 56


def flops_by_module(
    shares: Sequence[FlopShare], ticks: Sequence[str], names: Sequence[str]
) -> go.Figure:
    """Bars from top to bottom in the given order; each segment also carries its dtype as text."""
    figure = go.Figure()
    dtypes = sorted({dtype for share in shares for dtype, _ in share.by_dtype})
    for dtype in dtypes:
        counts = [dict(share.by_dtype).get(dtype, 0) for share in shares]
        figure.add_bar(
            name=for_plotly(dtype),
            orientation="h",
            y=list(range(len(shares))),
            x=[n / 1e6 for n in counts],
            marker={"color": dtype_color(dtype), "line": {"color": OUTLINE, "width": 0.5}},
            text=[for_plotly(dtype) if n else "" for n in counts],
            textposition="inside",
            insidetextanchor="middle",
            insidetextfont={"color": text_on(dtype_color(dtype))},
            hovertext=[
                f"<b>{for_plotly(name)}</b><br>{for_plotly(dtype)}: {n / 1e6:,.3f} M of "
                f"{share.total / 1e6:,.3f} M, {100 * n / max(share.total, 1):.3g} %"
                for name, share, n in zip(names, shares, counts, strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    figure.update_layout(
        barmode="stack",
        bargap=0.25,
        height=ROW_PX * len(shares) + TOP + BOTTOM + 20,
        margin={"t": TOP, "b": BOTTOM, "l": 10, "r": 10},
        showlegend=True,
        legend=ABOVE,
        xaxis={"title": {"text": "million operations per step"}},
        yaxis={
            "range": [len(shares) - 0.5, -0.5],
            "tickvals": list(range(len(shares))),
            "ticktext": [for_plotly(t) for t in ticks],
            "automargin": True,
            "tickfont": {"size": NAME_SIZE},
            "showgrid": False,
            "title": {"text": "module"},
        },
    )
    return figure
