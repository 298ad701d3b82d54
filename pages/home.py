"""Home: this machine in one line, the demo, and the recent runs."""

import streamlit as st

from app import machine, sitemap
from app.home import demo, recent_runs

st.title("Home", anchor=False)
machine.line()
st.page_link(
    sitemap.LEARN.file,
    label="New to mixed precision? Lessons that measure",
    icon=sitemap.LEARN.icon,
)

if not demo.follow():
    runs = recent_runs.listed()
    if runs:
        recent_runs.show(runs)
    else:
        demo.invite()
