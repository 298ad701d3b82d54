"""Home: the ways in, the newest verdicts with what to do, and the newest runs."""

import streamlit as st

from app import home, run_list, telemetry
from app.runs import diagnoses

st.title("Home", anchor=False)
telemetry.machine_line()
runs = run_list.listed_runs()
home.show_doors(is_empty=not runs)
if not home.follow() and (runs or diagnoses.busy_with()):
    home.show_newest(runs)
home.show_keys()
