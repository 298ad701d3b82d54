"""The teacher's switch on a run: shown to the class, or not."""

from __future__ import annotations

import streamlit as st

from ampscope.records import RunInfo
from app import options, permissions, run_rows
from app.permissions import Role
from app.runs import probes


def offer(run: RunInfo) -> None:
    """Draw it for the teacher of a class. Lessons are shown to everybody and have none."""
    if permissions.role() is not Role.TEACHER or run.spec.kind == "lesson":
        return
    key = f"shared-{run.id}"
    st.session_state[key] = run.id in run_rows.shared(options.current().store)
    st.toggle("Shown to the class", key=key, on_change=_switch, args=(run, key))


def _switch(run: RunInfo, key: str) -> None:
    probes.share(run, wanted=bool(st.session_state[key]))
