"""A lesson's measurement: found by its spec among the runs, else started, and followed.

Equal questions meet in one run: the spec holds the lesson's settings and its version, and the torch
that measured must be the torch that is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import streamlit as st

from ampscope.launcher import children
from ampscope.launcher.launch import launch
from ampscope.records import Result, RunInfo, RunSpec, State
from ampscope.store import sharing
from app import classes, links, permissions, run_rows, states, store
from app.classes import QueueFull
from app.runs import measurements, run_page
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
    if classes.is_class() and (not runs or classes.queue().place(spec)):
        _waiting(spec)
    runs = runs or ([] if classes.is_class() else [_started(spec)])
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


def expect(specs: Iterable[RunSpec]) -> None:
    """One of these may be asked for soon: torch is loaded while the question is read."""
    if any(permissions.may_run(spec) and not equal(spec) for spec in specs):
        children.expect(store.path())


def equal(spec: RunSpec) -> list[RunInfo]:
    """Runs of the same spec by the same torch, newest first; those that wait have no torch yet."""
    return classes.answering(run_rows.of_spec(store.path(), spec))


def _started(spec: RunSpec, *, again: bool = False) -> RunInfo:
    with _starting:
        known = classes.answering(sharing.of_spec(store.path(), spec))  # as it is now
        if known and (known[0].state.is_active or not again):
            return known[0]
        return store.run(launch(spec, store.path()))


def _start_again(spec: RunSpec) -> None:
    if classes.is_class():
        classes.ask(spec, again=True)
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
        if classes.ask(spec):
            st.rerun(scope="app")
    except QueueFull as error:
        st.warning(escape(str(error)), icon=":material/hourglass_top:")
        return
    place = classes.queue().place(spec)
    text = "It is the next to be measured." if place <= 1 else f"Place {place} in the queue."
    st.info(f"**The class waits for this measurement.** {text}", icon=":material/hourglass_top:")


# Predict first: a question with choices, and what the measurement says of the prediction.
#
# The choice lives in the URL (``?guess3=b``); ``?guess3=show`` shows the answer without one. An
# address shows what is there; it is a click that starts a measurement (:func:`is_clicked`).


LETTERS = "abcdef"
SHOW = "show"  # the answer without a prediction
_CLICKED = "lesson-clicked:"  # session key


@dataclass(frozen=True, slots=True)
class Answer:
    """Which choice the measured numbers support, and a sentence computed from them."""

    choice: int
    text: str


def ask(number: int | str, question: str, choices: Sequence[str]) -> str | None:
    """The letter that was chosen, :data:`SHOW`, or None as long as nothing was."""
    name = f"guess{number}"
    letters = list(LETTERS[: len(choices)])
    known = links.wanted(name)
    guess = known if known in (*letters, SHOW) else None
    shown = guess if guess in letters else None
    key = links.widget_key(name, shown)
    st.radio(
        f"**Predict first.** {escape(question)}",
        letters,
        index=None if shown is None else letters.index(shown),
        key=key,
        format_func=lambda letter: escape(choices[letters.index(letter)]),
        on_change=_remember,
        args=(number, key),
    )
    if guess is None:
        st.button("Show without a prediction", key=f"show{number}", on_click=_show,
                  args=(number,))  # fmt: skip
    else:
        st.button("Hide the answer", key=f"hide{number}", type="tertiary", on_click=links.keep,
                  args=(name, None))  # fmt: skip
    return guess


def judge(guess: str, choices: Sequence[str], answer: Answer) -> None:
    """Show the prediction and the measurement; in words, not by colour alone."""
    right = LETTERS[answer.choice]
    measured = f"**Measured.** {escape(answer.text)}"
    if guess == SHOW:
        st.info(measured, icon=":material/straighten:")
    elif guess == right:
        st.success(f"**As you predicted.**  \n{measured}", icon=":material/check:")
    else:
        said = escape(choices[LETTERS.index(guess)])
        st.warning(f"**You predicted:** {said}.  \n{measured}", icon=":material/straighten:")


def click(number: int | str) -> None:
    """The reader asks for this lesson's measurement."""
    st.session_state[_CLICKED + str(number)] = True


def is_clicked(number: int | str) -> bool:
    """Whether this reader predicted, or asked, with a click. An address can be another's: a link
    on a foreign page must start nothing."""
    return bool(st.session_state.get(_CLICKED + str(number)))


def _show(number: int | str) -> None:
    click(number)
    links.keep(f"guess{number}", SHOW)


def _remember(number: int | str, key: str) -> None:
    if st.session_state[key] in tuple(LETTERS):
        click(number)
        links.keep(f"guess{number}", st.session_state[key])
