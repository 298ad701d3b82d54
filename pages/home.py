"""Home: this machine in one line, the demo, and the recent runs."""

import streamlit as st

from app import home, links, machine

st.title("Home", anchor=False)
machine.line()
st.page_link(
    links.LEARN.file,
    label="New to mixed precision? Lessons that measure",
    icon=links.LEARN.icon,
)

if not home.follow():
    runs = home.listed_runs()
    if runs:
        home.show_newest(runs)
    else:
        home.invite()
