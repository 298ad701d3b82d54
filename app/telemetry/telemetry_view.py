"""Sections of the Telemetry page."""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

from ampscope.records import RunInfo
from app import chart, layout, links, states, store
from app.figures.telemetry import telemetry_figure
from app.telemetry import telemetry_data, telemetry_words
from app.telemetry.telemetry_data import Telemetry
from app.text import escape


def show(run: RunInfo) -> None:
    """The whole: which device, the sentence, what disturbed it, the chart."""
    by_device, disturbed = telemetry_data.sums(run)
    if not by_device:
        states.nothing_recorded(*telemetry_words.missing(run))
        return
    devices = list(by_device)
    # As a list: the buttons of pick() render Markdown, and an imported run names its devices.
    device = devices[0] if len(devices) == 1 else links.select("Device", "device", devices)
    found = telemetry_data.read(run, device)
    layout.sentence(telemetry_words.answer(found))
    layout.key_figures(telemetry_words.key_figures(found))
    for text in disturbed:
        st.warning(escape(text))
    if not disturbed:
        layout.see(telemetry_words.UNDISTURBED)
    _chart(found)


def _chart(found: Telemetry) -> None:
    def drawn() -> go.Figure:
        return telemetry_figure(found.samples, found.origin, found.at_steps, found.steps)

    figure = store.drawn(found.run, f"telemetry-{found.device}", drawn)
    name = f"telemetry-{found.device.replace(':', '-')}"
    chart.show(figure, name, lambda: telemetry_data.table(found), key="telemetry")
