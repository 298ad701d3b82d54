"""Gradients: what half precision does to the numbers, module by module, at any loss scale."""

import streamlit as st

from app import states
from app.gradients import gradient_controls, gradients_view
from app.runs import run_page, trainings

run = run_page.opened("Gradients")
ranks = trainings.pick(run, may_merge=True)
roles = gradient_controls.recorded_roles(ranks)
if not roles:
    if not states.not_of_a_control(run):
        states.no_histograms(run)
    st.stop()
left, right = st.columns([2, 5])
with left:
    role = gradient_controls.pick_role(roles)
with right:
    fmt = gradient_controls.pick_format(ranks[0])
gradients_view.show(ranks, role, fmt)
