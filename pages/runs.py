"""Runs: everything that the store holds, to be searched, opened, stopped and deleted."""

import streamlit as st

from app import run_list

st.title("Runs", anchor=False)
run_list.show_all()
