"""Gradients: what half precision does to the numbers, module by module, at any loss scale."""

import streamlit as st

from app import states
from app.gradients import frames, page
from app.runs import run_page

run = run_page.open_run("Gradients")
ranks = run_page.pick(run, may_merge=True)
roles = frames.recorded_roles(ranks)
if not roles:
    if not states.not_of_a_control(run):
        states.no_histograms(run)
    st.stop()
left, right = st.columns([2, 5])
with left:
    role = page.pick_role(roles)
with right:
    fmt = page.pick_format(ranks[0])
page.show_role(ranks, role, fmt)
