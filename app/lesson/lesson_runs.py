"""A lesson's measurement: found by its spec among the runs, else started, and followed.

Equal questions meet in one run: the spec holds the lesson's settings and its version, and the torch
that measured must be the torch that is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import streamlit as st

from ampscope.experiments import children
from ampscope.experiments.launch import launch
from ampscope.records import Result, RunInfo, RunSpec, State
from ampscope.store import sharing
from app import permissions, run_rows, states, store
from app.classes import class_requests
from app.classes.class_queue import Full
from app.runs import measurements, report_buttons
from app.text import escape

FOLLOW_EVERY_S = 0.4
ASK_EVERY_S = 1.0  # of a class, in which sixty browsers may wait
_starting = threading.Lock()  # of two browsers that ask at once one starts it


def results(spec: RunSpec, *, is_asked: bool, ask: Callable[[], None]) -> list[Result] | None:
    """What was measured; None while there is nothing yet, and then the page says why.

    Nothing is started before ``is_asked``; until then a button is drawn that calls ``ask``.
    """
    permissions.require(permissions.may_run(spec), "this measurement")
    runs = equal(spec)
    if not runs and not is_asked:
        st.info("**Not measured here yet.** It takes a few seconds.")
        st.button("Measure on this machine", key="lesson-start", type="primary", on_click=ask)
        return None
    if class_requests.is_class() and (not runs or class_requests.queue().place(spec)):
        _waiting(spec)
    runs = runs or ([] if class_requests.is_class() else [_started(spec)])
    if not runs:
        return None
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
        if not newest.state.is_active and permissions.is_trusted():
            again = st.button("Measure again", key="lesson-again", type="tertiary")
            if again:
                _start_again(spec)
                st.rerun()
        report_buttons.draw(finished)
    return store.results(finished)


def expect(specs: Iterable[RunSpec]) -> None:
    """One of these may be asked for soon: torch is loaded while the question is read."""
    if any(permissions.may_run(spec) and not equal(spec) for spec in specs):
        children.expect(store.path())


def equal(spec: RunSpec) -> list[RunInfo]:
    """Runs of the same spec by the same torch, newest first; those that wait have no torch yet."""
    return class_requests.answering(run_rows.of_spec(store.path(), spec))


def _started(spec: RunSpec, *, again: bool = False) -> RunInfo:
    with _starting:
        known = class_requests.answering(sharing.of_spec(store.path(), spec))  # as it is now
        if known and (known[0].state.is_active or not again):
            return known[0]
        return store.run(launch(spec, store.path()))


def _start_again(spec: RunSpec) -> None:
    if class_requests.is_class():
        class_requests.ask(spec, again=True)
    else:
        _started(spec, again=True)


def _failed(run: RunInfo, spec: RunSpec) -> None:
    states.measurement_ended(run)
    if permissions.offers("measuring it again") and st.button("Try again", key="lesson-retry"):
        _start_again(spec)
        st.rerun()


@st.fragment(run_every=FOLLOW_EVERY_S)
def _following(run_id: str) -> None:
    run = store.run(run_id)
    if not run.state.is_active:
        st.rerun(scope="app")
    waits = run.state is State.QUEUED and run.place > 1
    text = f"It waits, place {run.place} in the queue." if waits else "It takes a few seconds."
    st.info(f"**Measuring on this machine.** {text}", icon=":material/hourglass_top:")


@st.fragment(run_every=ASK_EVERY_S)
def _waiting(spec: RunSpec) -> None:
    """Ask again, which keeps the place in the class's queue, until there is a run."""
    try:
        if class_requests.ask(spec):
            st.rerun(scope="app")
    except Full as error:
        st.warning(escape(str(error)), icon=":material/hourglass_top:")
        return
    place = class_requests.queue().place(spec)
    text = "It is the next to be measured." if place <= 1 else f"Place {place} in the queue."
    st.info(f"**The class waits for this measurement.** {text}", icon=":material/hourglass_top:")
