"""Gradients: what half precision does to the numbers, module by module, at any loss scale."""

import streamlit as st

from app import gradient_controls, gradients_view, run_page, states

run = run_page.opened("Gradients")
roles = gradient_controls.recorded_roles(run)
if not roles:
    if not states.not_of_a_control(run):
        states.nothing_recorded(
            "This run holds no histograms.",
            "Start the probe with --histogram-every 1 to see its numbers.",
        )
    st.stop()
left, right = st.columns([2, 5])
with left:
    role = gradient_controls.pick_role(roles)
with right:
    fmt = gradient_controls.pick_format(run)
gradients_view.show(run, role, fmt)
