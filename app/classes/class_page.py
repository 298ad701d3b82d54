"""The teacher's page of a class: what runs, what waits, and the lessons made ready beforehand."""

from __future__ import annotations

import time

import streamlit as st

from ampscope.lessons.catalog import lesson_title
from ampscope.records import RunInfo
from app import layout, options, permissions, states, store
from app.classes import class_requests
from app.classes.class_queue import Request
from app.permissions import Role
from app.runs import probes, run_page
from app.text import code, duration, escape, plural

REFRESH_EVERY_S = 2.0
SHOWN = 8  # of what waits; the button below stays on the screen


def show() -> None:
    """The whole page."""
    st.title("Class", anchor=False)
    if permissions.role() is Role.OPERATOR:
        states.nothing_recorded("This dashboard is yours alone.", "To open it to a class:")
        st.code("ampscope dashboard --classroom", language="bash")
        return
    permissions.require(permissions.role() is Role.TEACHER, "this page")
    classroom = options.current().classroom
    if classroom is not None and classroom.link:
        st.markdown(f"The link for students: {code(classroom.link)}")
    st.fragment(_now, run_every=REFRESH_EVERY_S)()
    st.subheader("Before the class", anchor=False)
    layout.see(
        "Each lesson is measured once and then shown to everybody. Measured beforehand, no student "
        "waits. A run of yours is seen by the class when you switch on Shown to the class on it."
    )
    if st.button("Measure all lessons", key="class-prepare"):
        asked = class_requests.prepare()
        words = f"{plural(asked, 'lesson')} will be measured." if asked else "All are there."
        st.toast(escape(words))


def _now() -> None:
    waiting = class_requests.queue().waiting()
    active = [run for run in store.runs() if run.state.is_active]
    layout.sentence(_sentence(waiting, active))
    for run in active:
        with st.container(horizontal=True, vertical_alignment="center"):
            run_page.title_line(run)
            if st.button("Cancel", key=f"class-cancel-{run.id}"):
                probes.cancel(run)
                st.toast("It stops at its next step.")
    for place, request in enumerate(waiting[:SHOWN], 1):
        key = f"class-withdraw-{hash(request.spec)}"  # of the request: places move up meanwhile
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(escape(_waits(place, request)), width="content")
            st.button(
                "Withdraw", key=key, on_click=class_requests.withdraw,
                args=(request.spec,),
            )  # fmt: skip

    if len(waiting) > SHOWN:
        st.caption(f"And {len(waiting) - SHOWN} more.")


def _sentence(waiting: list[Request], active: list[RunInfo]) -> str:
    if not active and not waiting:
        return "Nothing runs, and nobody waits."
    now = f"{plural(len(active), 'run')} under way" if active else "Nothing runs"
    return f"{now}; the class waits for {plural(len(waiting), 'measurement')}."


def _waits(place: int, request: Request) -> str:
    people = plural(len(request.asked), "tab")
    waits = duration(max(0.0, time.monotonic() - request.since))
    return f"Place {place}: {lesson_title(request.spec)}, for {people}, since {waits}"
