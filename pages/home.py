"""Home: this machine in one line, the demo, and the recent runs."""

import streamlit as st

from app import demo, machine, recent_runs, store

st.title("Home", anchor=False)
machine.line()

if not demo.follow():
    runs = store.runs()
    if runs:
        recent_runs.show(runs)
    else:
        demo.invite()
