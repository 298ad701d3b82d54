"""Frameworks: the same network in PyTorch, Keras and Paddle, side by side."""

import streamlit as st

from app import chart, links
from app.ext import frameworks
from app.runs import actions

st.title("Frameworks", anchor=False)
links.show_section("Reference")

group = frameworks.pick_group()
runs = actions.of_group(group) if group else []
if any(run.state.is_active for run in runs):
    actions.show_progress(group, key="fw")
elif runs:
    frameworks.show_differences(runs)
    with chart.details("Their losses, and how each run ended"):
        actions.show_progress(group, key="fw")
else:
    frameworks.nothing_trained()

with st.expander("Train one", expanded=not runs):
    started = frameworks.show_form()
if started:
    links.keep("frameworks", started)
    st.rerun()
