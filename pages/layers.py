"""Layers: what ran in which precision, module by module, and why some of it stayed in fp32."""

import streamlit as st

from app import layers, states
from app.runs import run_page

run = run_page.open_run("Layers")
shown, kernels = layers.choose_ops(run), layers.kernels_of(run)
if not shown.modules:
    if kernels:
        with states.contained():
            layers.show_kernels(kernels)
    elif not states.not_of_a_control(run):
        states.nothing_recorded(
            "This run holds no module.", "A run that failed while its model was built has none."
        )
    st.stop()
if run.spec.kind == "watch" or (run.spec.framework != "torch" and not shown.all_ops):
    layers.show_stored_dtypes(run, shown)
    st.stop()
if not shown.all_ops:
    states.nothing_recorded(
        "The ops of this run were not traced.",
        "Only stored dtypes are shown. Start the probe with --trace-every 1 to see its ops.",
    )
with states.contained():
    layers.show_overview(run, shown)
with states.contained():
    layers.show_flops(shown)
with states.contained():
    layers.show_tree(shown)
with states.contained():
    layers.show_module(run, shown)
with states.contained():
    layers.show_fp32(run, shown)
with states.contained():
    layers.show_casts(shown)
if kernels:
    with states.contained():
        layers.show_kernels(kernels)
