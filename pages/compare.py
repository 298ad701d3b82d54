"""Compare: precisions side by side on this machine, and whether AMP pays here."""

import streamlit as st

from app import links, states
from app.ext import compare
from app.runs import measurements

st.title("Compare", anchor=False)
links.show_section("This machine")
run = measurements.open_measurement("compare")
if run is not None:
    with states.contained():
        compare.show_comparison(run)
elif not measurements.of_kind("compare"):
    states.nothing_recorded(
        "Nothing has been compared on this machine yet.",
        "Choose a workload and at least two precisions; it takes up to three minutes.",
    )

with st.expander("New comparison", expanded=run is None):
    compare.comparison_form()
