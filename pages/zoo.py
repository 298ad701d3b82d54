"""Zoo: real failures to diagnose, each with its public source and its healthy twin."""

import streamlit as st

from app.zoo import zoo_data, zoo_view

st.title("Zoo", anchor=False)
with st.spinner("Reading the diagnoses in the store."):
    rows = zoo_data.rows()
    healthy = zoo_data.healthy()
zoo_view.overview(rows, healthy)
zoo_view.follow(rows, healthy)
zoo_view.cases(rows)
zoo_view.healthy(healthy)
