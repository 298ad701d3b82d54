"""Zoo: real failures to diagnose, each with its public source and its healthy twin."""

import streamlit as st

from app import zoo

st.title("Zoo", anchor=False)
with st.spinner("Reading the diagnoses in the store."):
    rows = zoo.rows()
    healthy = zoo.healthy_scripts()
zoo.show_overview(rows, healthy)
zoo.follow(rows, healthy)
zoo.show_cases(rows)
zoo.show_healthy(healthy)
