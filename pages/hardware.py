"""Hardware: what this machine can give in half precision, what it reaches, and what it does now."""

import streamlit as st

from app import layout, machine, states
from app.hardware import capability_table, hardware_bench, readings, telemetry_live
from app.text import escape

st.title("Hardware", anchor=False)
report = machine.report()
answer = st.container()
machine.verdict(report)
with states.part():
    hardware_bench.draw(report, answer)

st.subheader("Now", anchor=False)
readings.draw()
telemetry_live.draw()

st.subheader("Software", anchor=False)
st.table(readings.software(report), border="horizontal")

st.subheader("Tensor Cores by compute capability", anchor=False)
st.markdown(escape(capability_table.sentence(report)))
capability_table.draw(report)

with layout.details("The whole report as JSON"):
    st.code(machine.as_json(report), language="json")
