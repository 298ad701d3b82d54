"""Home: this machine in one line, the demo, and the recent runs."""

import streamlit as st

from app import demo, machine, recent_runs, store

st.title("Home", anchor=False)
machine.line()

demo_is_shown = demo.follow()
runs = store.runs()
if runs:
    recent_runs.show(runs)
elif not demo_is_shown:
    demo.invite()
