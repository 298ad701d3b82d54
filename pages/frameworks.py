"""Frameworks: the same network in PyTorch, Keras and Paddle, side by side."""

import streamlit as st

from app import frameworks_form, frameworks_view, links, live

st.title("Frameworks", anchor=False)

group = frameworks_view.pick()
runs = live.panel(group, key="fw") if group else []
if runs and not any(run.state.is_active for run in runs):
    frameworks_view.show(runs)
elif not runs:
    frameworks_view.empty()

with st.expander("Train it again", expanded=not runs):
    started = frameworks_form.show()
if started:
    links.keep("frameworks", started)
    st.rerun()
