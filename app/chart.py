"""One way to show a chart: its data as CSV and its picture as SVG, on every page."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from app import permissions
from app.text import for_csv

_REMOVED = ["lasso2d", "select2d", "autoScale2d"]  # three ways to lose one's place


def show(
    figure: go.Figure, name: str, table: Callable[[], pd.DataFrame], *, key: str, alt: str = ""
) -> None:
    """Draw ``figure``; ``table`` is called only when somebody downloads the data.

    ``name`` names the files: letters, digits and hyphens. ``alt`` says in words what is seen, for
    those who cannot see it.
    """
    st.plotly_chart(figure, key=key, config=config(name), alt=alt or None)
    download(table, name, key=key)


def download(table: Callable[[], pd.DataFrame], name: str, *, key: str) -> None:
    """A quiet button for the data behind a chart or a table."""

    def as_csv() -> bytes:
        return as_csv_text(table()).encode()

    file("Data as CSV", as_csv, f"{name}.csv", "text/csv", key=f"{key}-csv")


def as_csv_text(table: pd.DataFrame) -> str:
    """The table as CSV, without its index, in which no text is a formula of a spreadsheet."""
    safe = table.rename(columns=for_csv)
    for column in safe.columns:
        if not pd.api.types.is_numeric_dtype(safe[column]):
            safe[column] = safe[column].map(for_csv)
    return safe.to_csv(index=False)


def file(label: str, content: Callable[[], bytes], name: str, mime: str, *, key: str) -> None:
    """A quiet button for a file that is made when somebody clicks, by the rights of whoever sees
    the button."""
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
