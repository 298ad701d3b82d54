"""Hardware: what this machine can give in half precision, what it reaches, and what it does now."""

import streamlit as st

from app import chart, hardware, links, states, telemetry
from app.text import escape

st.title("Hardware", anchor=False)
links.show_section("This machine")
report = telemetry.machine_report()
answer = st.container()
hardware.draw_sentence(report)
with states.contained():
    hardware.draw_bench(report, answer)

st.subheader("Now", anchor=False)
hardware.draw_readings()
hardware.draw_telemetry()

st.subheader("Software", anchor=False)
st.table(hardware.software(report), border="horizontal")

st.subheader("Tensor Cores by compute capability", anchor=False)
st.markdown(escape(hardware.capability_answer(report)))
hardware.draw_capability(report)

with chart.details("The whole report as JSON"):
    hardware.draw_json(report)
