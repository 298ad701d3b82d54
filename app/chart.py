"""The parts of every page, in their order: a sentence, at most four key figures, what to see, the
chart with its data as CSV and its picture as SVG, folded details.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator
from streamlit.elements.lib.column_types import ColumnConfig

from ampscope.story.document import Figure
from app import permissions
from app.text import escape, for_csv

_REMOVED = ["lasso2d", "select2d", "autoScale2d"]  # three ways to lose one's place
MAX_KEY_FIGURES = 4
# Numbers and words that Markdown leaves as they are; a name from a run is escaped.
_FIGURE = re.compile(r"(?!www\.|\d+[.)] )[A-Za-z0-9−≥≤∞](?:[A-Za-z0-9 ,.%×^/()+−∞µ·–]|-(?!-))*")
KeyFigure = Figure  # a label of two or three words, a value, and on hover what it means


def sentence(text: str) -> None:
    """The page's answer for this run, in plain words. Names in it are shown as text."""
    st.subheader(escape(text), anchor=False)


def key_figures(figures: Sequence[KeyFigure]) -> None:
    """At most four, side by side."""
    if len(figures) > MAX_KEY_FIGURES:
        raise ValueError(f"{len(figures)} key figures; a page has at most {MAX_KEY_FIGURES}")
    with st.container(horizontal=True):  # wraps where four do not fit beside each other
        for figure in figures:
            st.metric(
                escape(figure.label),
                figure.value if _FIGURE.fullmatch(figure.value) else escape(figure.value),
                help=escape(figure.note) or None,
                border=True,
            )


def see(text: str) -> None:
    """What to see in the chart below."""
    st.markdown(escape(text))


def show(
    figure: go.Figure,
    name: str,
    table: Callable[[], pd.DataFrame],
    *,
    key: str,
    alt: str = "",
    is_wide: bool = False,
) -> None:
    """Draw ``figure``; ``table`` is called only when a user downloads the data.

    ``name`` names the files: letters, digits and hyphens. ``alt`` says in words what is seen, for
    those who cannot see it. ``is_wide``: it needs more room than a phone has, and is moved sideways
    there (states.STYLE).
    """
    place = st.container(key=f"wide-{key}") if is_wide else contextlib.nullcontext()
    with place:
        st.plotly_chart(figure, key=key, config=config(name), alt=alt or None)
    download(table, name, key=key)


def download(table: Callable[[], pd.DataFrame], name: str, *, key: str) -> None:
    """A quiet button for the data behind a chart or a table."""

    def as_csv() -> bytes:
        return as_csv_text(table()).encode()

    file("Data as CSV", as_csv, f"{name}.csv", "text/csv", key=f"{key}-csv")


def table(
    frame: pd.DataFrame,
    name: str,
    *,
    key: str,
    most_px: int | None = None,
    columns: Mapping[str, ColumnConfig] | None = None,
    whole: Callable[[], pd.DataFrame] | None = None,
) -> None:
    """A table and the button for its data; ``whole`` makes them where the table shows less.
    ``most_px``: as high as its rows, up to that."""
    height: int | Literal["auto"] = "auto"
    if most_px is not None:
        height = min(most_px, 38 + 35 * max(1, len(frame)))
    st.dataframe(frame, key=key, hide_index=True, height=height, column_config=columns)
    download(whole or (lambda: frame), name, key=key)


def as_csv_text(table: pd.DataFrame) -> str:
    """The table as CSV, without its index, in which no text is a formula of a spreadsheet."""
    safe = table.rename(columns=for_csv)
    for column in safe.columns:
        if not pd.api.types.is_numeric_dtype(safe[column]):
            safe[column] = safe[column].map(for_csv)
    return safe.to_csv(index=False)


def file(label: str, content: Callable[[], bytes], name: str, mime: str, *, key: str) -> None:
    """A quiet button for a file that is made when a user clicks, with the rights of the user who
    sees the button."""
    st.download_button(
        label, permissions.lent(content), name, mime, key=key, type="tertiary", on_click="ignore"
    )


def config(name: str) -> dict[str, object]:
    """Plotly's tool bar: SVG export, zoom and pan, no logo."""
    return {
        "displaylogo": False,
        "modeBarButtonsToRemove": _REMOVED,
        "toImageButtonOptions": {"format": "svg", "filename": name},
    }


def details(title: str) -> DeltaGenerator:
    """A folded section: ``with chart.details("All modules"): …``"""
    return st.expander(title)
