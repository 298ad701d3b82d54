"""A lesson's chart: large where asked for, with words and numbers for those who cannot see it."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from app import chart, layout
from app.lesson import large_type


def show(figure: go.Figure, name: str, table: pd.DataFrame, alt: str) -> None:
    """``alt`` says in a sentence what is drawn; the table holds every number of it."""
    if large_type.is_on():
        figure = go.Figure(figure)  # kept ones are everybody's
        large_type.enlarge(figure)
    chart.show(figure, name, lambda: table, key=name, alt=alt)
    with layout.details("This chart in words and numbers"):
        st.text(alt)
        st.dataframe(table, hide_index=True, key=f"{name}-table")
