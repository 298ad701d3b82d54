"""Tensor Cores: which matmuls of a training step use them, which do not, and what stops them."""

import streamlit as st

from app import chart, links, states, tensor_cores
from app.runs import measurements

st.title("Tensor Cores", anchor=False)
links.show_section("This machine")
run = measurements.open_measurement("cores")
if run is not None:
    with states.contained():
        tensor_cores.show_step(run)
    with chart.details("Measure another step"):
        tensor_cores.show_form()
else:
    if not measurements.of_kind("cores"):
        states.nothing_recorded(
            "No training step has been measured yet.",
            "Choose one: it is run once, then each of its matmuls alone.",
        )
    tensor_cores.show_form()
