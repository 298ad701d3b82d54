"""Frameworks: the same network in PyTorch, Keras and Paddle, side by side."""

import streamlit as st

from app import layout, links
from app.frameworks import frameworks_form, frameworks_view
from app.runs import live, probes

st.title("Frameworks", anchor=False)

group = frameworks_view.pick()
runs = probes.of_group(group) if group else []
if any(run.state.is_active for run in runs):
    live.panel(group, key="fw")
elif runs:
    frameworks_view.show(runs)
    with layout.details("Their losses, and how each run ended"):
        live.panel(group, key="fw")
else:
    frameworks_view.empty()

with st.expander("Train one", expanded=not runs):
    started = frameworks_form.show()
if started:
    links.keep("frameworks", started)
    st.rerun()
