"""The FLOPs of each module as bars, split by dtype."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ampscope.analysis.op_precision import FlopShare
from ampscope.story.palette import OUTLINE, dtype_color, text_on
from app.figures import ABOVE
from app.figures.exponents import NAME_SIZE
from app.text import for_plotly

ROW_PX, TOP, BOTTOM = 24, 40, 56


def flops_by_module(
    shares: Sequence[FlopShare], ticks: Sequence[str], names: Sequence[str]
) -> go.Figure:
    """One bar per module from top to bottom in the given order; each segment also carries its
    dtype as text."""
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
        xaxis={"title": {"text": "MFLOP per step"}},
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
