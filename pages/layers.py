"""Layers: what ran in which precision, module by module, and why some of it stayed in fp32."""

import streamlit as st

from app import states
from app.layers import layers_view
from app.runs import run_page

run = run_page.opened("Layers")
layers = layers_view.choose(run)
if not layers.modules:
    if not states.not_of_a_control(run):
        states.nothing_recorded(
            "This run holds no module.", "A run that failed while its model was built has none."
        )
    st.stop()
if run.spec.kind == "watch" or (run.spec.framework != "torch" and not layers.all_ops):
    layers_view.stored(run, layers)
    st.stop()
if not layers.all_ops:
    states.nothing_recorded(
        "The ops of this run were not traced.",
        "Only stored dtypes are shown. Start the probe with --trace-every 1 to see its ops.",
    )
with states.part():
    layers_view.overview(run, layers)
with states.part():
    layers_view.flops(layers)
with states.part():
    layers_view.tree(layers)
with states.part():
    layers_view.one_module(run, layers)
with states.part():
    layers_view.in_fp32(run, layers)
with states.part():
    layers_view.casts(layers)
