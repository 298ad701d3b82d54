"""New probe: choose what is trained and how, start it, follow it, cancel it."""

import streamlit as st

from app import links, new_probe, permissions
from app.runs import actions

st.title("New probe", anchor=False)
permissions.require(permissions.is_trusted(), "starting probes")

group = links.wanted("group")
if group and actions.show_progress(group, key="new"):
    if st.button("Set up another probe", key="np-another"):
        links.keep("group", None)
        st.rerun()
    st.stop()

specs = new_probe.filled()
label = f"Start {len(specs)} probes" if len(specs) > 1 else "Start the probe"
if st.button(label, type="primary", disabled=not specs, key="np-start"):
    links.keep("group", actions.start(specs))
    st.rerun()
