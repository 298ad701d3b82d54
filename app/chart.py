"""One way to show a chart: its data as CSV and its picture as SVG, on every page."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from app import permissions

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
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
    """A spreadsheet takes a cell that begins with one of these for a formula, whoever wrote it: an
    apostrophe in front makes it a text (owasp.org/www-community/attacks/CSV_Injection)."""

    def plain(cell: object) -> object:
        if not isinstance(cell, str) or not cell.lstrip(" ").startswith(_FORMULA):
            return cell
        try:
            float(cell)
        except ValueError:
            return f"'{cell}"
        return cell  # "-4" is a number

    safe = table.rename(columns=plain)
    for column in safe.columns:
        if not pd.api.types.is_numeric_dtype(safe[column]):
            safe[column] = safe[column].map(plain)
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
