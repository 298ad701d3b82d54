"""A lesson's measurement: found by its spec among the runs, else started, and followed.

Equal questions meet in one run: the spec holds the lesson's settings and its version, and the torch
that measured must be the torch that is installed.
"""

from __future__ import annotations

import threading
from functools import cache

import streamlit as st

from ampscope.experiments.launch import launch
from ampscope.hardware.software import read_software
from ampscope.records import Result, RunInfo, RunSpec, State
from app import measurements, store
from app.text import escape

FOLLOW_EVERY_S = 0.4
RUNS_READ = 4_000
_starting = threading.Lock()  # of two browsers that ask at once one starts it


def results(spec: RunSpec) -> list[Result] | None:
    """What was measured; None while there is nothing yet, and then the page says why."""
    runs = equal(spec)
    if not runs:
        runs = [_started(spec)]
    newest = runs[0]
    finished = next((run for run in runs if run.state is State.FINISHED), None)
    if newest.state.is_active:
        _following(newest.id)
    elif newest.state is not State.FINISHED:
        _failed(newest, spec)
    if finished is None:
        return None
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"Measured on {escape(measurements.made(finished))}", width="content")
        if not newest.state.is_active:
            again = st.button("Measure again", key="lesson-again", type="tertiary")
            if again:
                _started(spec, again=True)
                st.rerun()
    return store.results(finished)


def equal(spec: RunSpec) -> list[RunInfo]:
    """Runs of the same spec by the same torch, newest first; those that wait have no torch yet."""
    return [
        run
        for run in store.runs(RUNS_READ)
        if run.spec == spec and (run.machine is None or run.machine.torch == _torch())
    ]


def _started(spec: RunSpec, *, again: bool = False) -> RunInfo:
    with _starting:
        known = equal(spec)
        if known and (known[0].state.is_active or not again):
            return known[0]
        return store.run(launch(spec, store.path()))


@cache
def _torch() -> str | None:
    return read_software().torch


def _failed(run: RunInfo, spec: RunSpec) -> None:
    reason = escape(run.message or "No reason was recorded.")
    st.error(f"**This measurement {run.state}.** {reason}")
    if run.traceback:
        with st.expander("Its own traceback"):
            st.code(run.traceback, language=None, wrap_lines=True)
    if st.button("Try again", key="lesson-retry"):
        _started(spec, again=True)
        st.rerun()


@st.fragment(run_every=FOLLOW_EVERY_S)
def _following(run_id: str) -> None:
    run = store.run(run_id)
    if not run.state.is_active:
        st.rerun(scope="app")
    waits = run.state is State.QUEUED and run.place > 1
    text = f"It waits, place {run.place} in the queue." if waits else "It takes a few seconds."
    st.info(f"**Measuring on this machine.** {text}", icon=":material/hourglass_top:")
