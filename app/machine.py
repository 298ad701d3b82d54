"""This machine, read at most every few seconds: one line for Home, the whole for Hardware."""

from __future__ import annotations

import streamlit as st

from ampscope.hardware.describe import (
    HardwareReport,
    describe_machine,
    one_line,
    report_json,
    sentence,
)
from app.text import escape

READ_EVERY_S = 2.0


@st.cache_data(ttl=READ_EVERY_S, show_spinner=False)
def report() -> HardwareReport:
    """What the machine is and how busy it is now."""
    return describe_machine()


def line() -> None:
    """Device, capability, torch and policy in one line."""
    st.caption(escape(one_line(report())))


def verdict(report: HardwareReport) -> None:
    """What AMP can and cannot give here; the first sentence large."""
    st.markdown(escape(sentence(report)))


def as_json(report: HardwareReport) -> str:
    """The whole report."""
    return report_json(report)
