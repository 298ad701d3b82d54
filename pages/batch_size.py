"""Batch size: the largest batch that fits in each precision, and where throughput levels off."""

import streamlit as st

from app import links, states
from app.ext import compare
from app.runs import measurements

st.title("Batch size", anchor=False)
links.show_section("This machine")
run = measurements.open_measurement("batch")
if run is not None:
    with states.contained():
        compare.show_batches(run)
elif not measurements.of_kind("batch"):
    states.nothing_recorded(
        "No batch size has been searched on this machine yet.",
        "Each trial is a process of its own, so running out of memory harms nothing.",
    )

with st.expander("New search", expanded=run is None):
    compare.batch_form()
