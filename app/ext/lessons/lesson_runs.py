"""A lesson's measurement: found by its spec among the runs, else started, followed, and read.

Equal questions meet in one run: the spec holds the lesson's settings and its version, and the torch
that measured must be the torch that is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import pandas as pd
import streamlit as st

from ampscope.launcher import children
from ampscope.launcher.launch import launch
from ampscope.records import Curve, Reading, Result, RunInfo, RunSpec, State, StepTimes
from ampscope.store import sharing
from app import permissions, run_rows, states, store
from app.ext.lessons import classroom
from app.ext.lessons.classroom import QueueFull
from app.runs import measurements, run_page
from app.text import escape, percent

FOLLOW_EVERY_S = 0.4
ASK_EVERY_S = 1.0  # of a class, in which sixty browsers may wait
WIDE = 0.5  # quartiles of an undisturbed step lie within 5 to 30 % of its median on two cores
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
    if classroom.is_class() and (not runs or classroom.queue().place(spec)):
        _waiting(spec)
    runs = runs or ([] if classroom.is_class() else [_started(spec)])
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
        st.caption(f"Measured on {escape(measurements.made_where(finished))}", width="content")
        if not newest.state.is_active and permissions.is_trusted():
            again = st.button("Measure again", key="lesson-again", type="tertiary")
            if again:
                _start_again(spec)
                st.rerun()
        run_page.offer_report(finished)
    return store.results(finished)


def equal(spec: RunSpec) -> list[RunInfo]:
    """Runs of the same spec by the same torch, newest first; those that wait have no torch yet."""
    return classroom.answering(run_rows.of_spec(store.path(), spec))


@st.fragment(run_every=ASK_EVERY_S)
def _waiting(spec: RunSpec) -> None:
    """Ask again, which keeps the place in the class's queue, until there is a run."""
    try:
        if classroom.ask(spec):
            st.rerun(scope="app")
    except QueueFull as error:
        st.warning(escape(str(error)), icon=":material/hourglass_top:")
        return
    place = classroom.queue().place(spec)
    text = "It is the next to be measured." if place <= 1 else f"Place {place} in the queue."
    st.info(f"**The class waits for this measurement.** {text}", icon=":material/hourglass_top:")


def _started(spec: RunSpec, *, again: bool = False) -> RunInfo:
    with _starting:
        known = classroom.answering(sharing.of_spec(store.path(), spec))  # as it is now
        if known and (known[0].state.is_active or not again):
            return known[0]
        return store.run(launch(spec, store.path()))


@st.fragment(run_every=FOLLOW_EVERY_S)
def _following(run_id: str) -> None:
    run = store.run(run_id)
    if not run.state.is_active:
        st.rerun(scope="app")
    waits = run.state is State.QUEUED and run.place > 1
    text = f"It waits, place {run.place} in the queue." if waits else "It takes a few seconds."
    st.info(f"**Measuring on this machine.** {text}", icon=":material/hourglass_top:")


def _failed(run: RunInfo, spec: RunSpec) -> None:
    states.measurement_ended(run)
    if permissions.offers("measuring it again") and st.button("Try again", key="lesson-retry"):
        _start_again(spec)
        st.rerun()


def _start_again(spec: RunSpec) -> None:
    if classroom.is_class():
        classroom.ask(spec, again=True)
    else:
        _started(spec, again=True)


def expect(specs: Iterable[RunSpec]) -> None:
    """One of these may be asked for soon: torch is loaded while the question is read."""
    if any(permissions.may_run(spec) and not equal(spec) for spec in specs):
        children.expect(store.path())


def warn(results: Sequence[Result]) -> None:
    """Say of times that were measured while something else ran that they are such: the quartiles of
    a step lie far apart."""
    spread = max((r.step.spread for r in results if isinstance(r, StepTimes)), default=0.0)
    if spread > WIDE:
        st.warning(
            escape(
                f"Something else ran on this machine meanwhile: the times of a step spread by "
                f"{percent(spread)} of their median. Measure again when it is idle."
            ),
            icon=":material/group:",
        )


def reading(results: Sequence[Result], name: str, series: str) -> float:
    """The number of that name and series. A missing one is a fault of the lesson: LookupError."""
    for one in results:
        if isinstance(one, Reading) and (one.name, one.series) == (name, series):
            return one.value
    raise LookupError(f"no reading {name!r} of {series!r}")


def curve(results: Sequence[Result], name: str, series: str) -> Curve:
    """The curve of that name and series; LookupError as above."""
    for one in results:
        if isinstance(one, Curve) and (one.name, one.series) == (name, series):
            return one
    raise LookupError(f"no curve {name!r} of {series!r}")


def curves(results: Sequence[Result], name: str) -> list[Curve]:
    """Every series of that name, in the order in which they were measured."""
    return [one for one in results if isinstance(one, Curve) and one.name == name]


def curves_table(found: Sequence[Curve], x_name: str) -> pd.DataFrame:
    """A column a curve, over the x that they share."""
    return pd.DataFrame({x_name: list(found[0].x)} | {c.series: list(c.y) for c in found})
