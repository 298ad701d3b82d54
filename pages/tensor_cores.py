"""Tensor Cores: which products of a training step use them, which do not, and what stops them."""

import streamlit as st

from app import layout, states
from app.cores import cores_form, cores_view
from app.runs import measurements

st.title("Tensor Cores", anchor=False)
run = measurements.opened("cores")
if run is not None:
    with states.part():
        cores_view.show(run)
    with layout.details("Measure another step"):
        cores_form.draw()
else:
    if not measurements.of_kind("cores"):
        states.nothing_recorded(
            "No training step has been measured yet.",
            "Choose one: it is run once, then each of its products alone.",
        )
    cores_form.draw()
