"""Runs: everything that the store holds, to be searched, opened, stopped and deleted."""

import streamlit as st

from app import home

st.title("Runs", anchor=False)
home.show_all()
