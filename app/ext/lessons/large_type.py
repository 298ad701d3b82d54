"""Large type for a lecture hall: a switch in the sidebar of every lesson, ``?type=large``.

Streamlit sizes everything in rem, so the root's font size enlarges texts, widgets and spaces alike.
Charts are drawn by Plotly in pixels and are enlarged by themselves.
"""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

from app import links

LARGE = "large"
FACTOR = 1.5  # 16 px become 24: readable at ten times the screen's height
STYLE = "<style>html { font-size: 24px !important; }</style>"
_NAME = "type"
_PLOTLY_SIZE = 12  # where a figure says nothing


def offer() -> None:
    """The switch, and its effect."""
    key = links.widget_key(_NAME, is_on())
    st.sidebar.toggle("Large type", is_on(), key=key, on_change=_remember, args=(key,),
                      help="For the last row.")  # fmt: skip
    if is_on():
        st.html(STYLE)


def _remember(key: str) -> None:
    links.keep(_NAME, LARGE if st.session_state[key] else None)


def is_on() -> bool:
    """Whether the address, or the session's last choice, asks for it."""
    return links.wanted(_NAME) == LARGE


def query() -> dict[str, str]:
    """What a link to another lesson carries on."""
    return {_NAME: LARGE} if is_on() else {}


def enlarge(figure: go.Figure) -> None:
    """Fonts, lines, markers, margins and height of ``figure``, in place."""
    figure.update_layout(
        font_size=_larger(figure.layout.font.size),
        legend_font_size=_larger(figure.layout.legend.font.size),
        hoverlabel_font_size=_larger(None),
        height=int((figure.layout.height or 400) * 1.2),
    )
    margin = figure.layout.margin
    figure.update_layout(
        margin={s: (margin[s] or 40) * FACTOR for s in ("t", "b", "l", "r")},
        annotations=[_with_font(a) for a in figure.layout.annotations],
    )
    for axis in (*figure.select_xaxes(), *figure.select_yaxes()):
        axis.tickfont.size = _larger(axis.tickfont.size)
        axis.title.font.size = _larger(axis.title.font.size)
    for trace in figure.data:
        if trace.type == "scatter" and trace.line.width:
            trace.line.width *= FACTOR
        if trace.type == "scatter" and isinstance(trace.marker.size, int | float):
            trace.marker.size *= FACTOR


def _larger(size: float | None) -> float:
    return (size or _PLOTLY_SIZE) * FACTOR


def _with_font(annotation: go.layout.Annotation) -> go.layout.Annotation:
    annotation.font.size = _larger(annotation.font.size)
    if annotation.yshift:
        annotation.yshift *= FACTOR
    return annotation
