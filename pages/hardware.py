"""Hardware: what this machine can give in half precision, what it is doing now, and the table."""

import streamlit as st

from app import capability_table, layout, machine, readings
from app.text import escape

st.title("Hardware", anchor=False)
report = machine.report()
machine.verdict(report)

st.subheader("Now", anchor=False)
readings.draw()

st.subheader("Software", anchor=False)
st.table(readings.software(report), border="horizontal")

st.subheader("Tensor Cores by compute capability", anchor=False)
st.markdown(escape(capability_table.sentence(report)))
capability_table.draw(report)

with layout.details("The whole report as JSON"):
    st.code(machine.as_json(report), language="json")
