"""A class on one machine: the teacher's page, what a session asks of the queue of measurements (one
queue for each store of this server), and that queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from ampscope.errors import AmpscopeError
from ampscope.ext.lessons.catalog import LESSONS, lesson_spec, lesson_title
from ampscope.hardware.describe import read_software
from ampscope.launcher.launch import launch
from ampscope.records import RunInfo, RunSpec, State
from ampscope.store import sharing
from app import chart, options, permissions, states, store
from app.permissions import ClassRole
from app.runs import actions, run_page
from app.text import code, duration, escape, plural

REFRESH_EVERY_S = 2.0
SHOWN = 8  # of what waits; the button below stays on the screen
MAX_WAITING = 40  # all lessons in all settings are about as many
MAX_OF_ONE = 3  # lessons that one session waits for: more is leafing through, not waiting
KEPT_S = 20.0  # a browser's clock may stand still for some seconds when its machine is busy
LOOK_EVERY_S = 0.2
MAX_SERVED = 1_000  # sessions whose turns are remembered
logger = logging.getLogger("ampscope.dashboard")
_making = threading.Lock()


def show_classroom() -> None:
    """The whole page."""
    st.title("Class", anchor=False)
    if permissions.role() is ClassRole.OPERATOR:
        states.nothing_recorded("This dashboard is yours alone.", "To open it to a class:")
        st.code("ampscope dashboard --classroom", language="bash", wrap_lines=True)
        return
    permissions.require(permissions.role() is ClassRole.TEACHER, "this page")
    classroom = options.current().classroom
    if classroom is not None and classroom.link:
        st.markdown(f"The link for students: {code(classroom.link)}")
    st.fragment(_now, run_every=REFRESH_EVERY_S)()
    st.subheader("Before the class", anchor=False)
    chart.see(
        "Each lesson is measured once and then shown to every student. Measured beforehand, no "
        "student "
        "waits. A run of yours is seen by the class when you switch on Shown to the class on it."
    )
    if st.button("Measure all lessons", key="class-prepare"):
        asked = prepare()
        words = f"{plural(asked, 'lesson')} will be measured." if asked else "All are there."
        st.toast(escape(words))


def _now() -> None:
    waiting = queue().waiting()
    active = [run for run in store.runs() if run.state.is_active]
    chart.sentence(_sentence(waiting, active))
    for run in active:
        with st.container(horizontal=True, vertical_alignment="center"):
            run_page.title_line(run)
            if st.button("Cancel", key=f"class-cancel-{run.id}"):
                actions.cancel_run(run)
                st.toast("It stops at its next step.")
    for place, request in enumerate(waiting[:SHOWN], 1):
        key = f"class-withdraw-{hash(request.spec)}"  # of the request: places move up meanwhile
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(escape(_waits(place, request)), width="content")
            st.button(
                "Withdraw", key=key, on_click=withdraw,
                args=(request.spec,),
            )  # fmt: skip

    if len(waiting) > SHOWN:
        st.caption(f"And {len(waiting) - SHOWN} more.")


def _sentence(waiting: list[QueuedRequest], active: list[RunInfo]) -> str:
    if not active and not waiting:
        return "Nothing runs, and no student waits."
    now = f"{plural(len(active), 'run')} under way" if active else "Nothing runs"
    return f"{now}; the class waits for {plural(len(waiting), 'measurement')}."


def _waits(place: int, request: QueuedRequest) -> str:
    people = plural(len(request.asked), "tab")
    waits = duration(max(0.0, time.monotonic() - request.since))
    return f"Place {place}: {lesson_title(request.spec)}, for {people}, since {waits}"


def is_class() -> bool:
    """Whether measurements go through the queue."""
    return options.current().classroom is not None


def ask(spec: RunSpec, *, again: bool = False) -> str:
    """The run that answers ``spec``, or "" while it waits. Raises QueueFull, Forbidden."""
    permissions.require(permissions.may_run(spec), "starting this measurement")
    permissions.require(not again or permissions.is_trusted(), "measuring again")
    is_teacher = permissions.role() is ClassRole.TEACHER
    return queue().ask(spec, _session(), teacher=is_teacher, again=again)


def prepare() -> int:
    """Ask for what every lesson shows first, as the teacher does before a class; how many are not
    there yet."""
    permissions.require(permissions.is_trusted(), "preparing the lessons")
    specs = [lesson_spec(one.id) for one in LESSONS.values() if one.is_measured]
    return sum(not queue().ask(s, "preparation", teacher=True, kept=True) for s in specs)


def withdraw(spec: RunSpec) -> None:
    """Take a request out of the queue, no matter who waits for it."""
    permissions.require(permissions.is_trusted(), "withdrawing a request")
    queue().withdraw(spec)


def answering(runs: Iterable[RunInfo]) -> list[RunInfo]:
    """Those by the installed torch; those that wait have no torch yet."""
    return [run for run in runs if run.machine is None or run.machine.torch == _torch()]


def queue() -> ClassQueue:
    """Of this store."""
    with _making:
        return _queue(store.path())


@cache
def _queue(path: Path) -> ClassQueue:
    return ClassQueue(
        find=partial(_known, path),
        launch=lambda spec: launch(spec, path),
        is_free=lambda: not any(_occupies(run) for run in sharing.active(path)),
    )


def _known(path: Path, spec: RunSpec) -> str:
    """A run that is under way, else a finished one, else the newest: it says why it failed."""
    runs = answering(sharing.of_spec(path, spec))
    good = (run for run in runs if run.state.is_active or run.state is State.FINISHED)
    return next((run.id for run in good), runs[0].id if runs else "")


def _occupies(run: RunInfo) -> bool:
    """A watched training may last for days, and on another machine."""
    return run.spec.kind != "watch"


def _session() -> str:
    context = get_script_run_ctx(suppress_warning=True)
    return context.session_id if context else ""


@cache
def _torch() -> str | None:
    return read_software().torch


class QueueFull(AmpscopeError):  # noqa: N818  # says what happened, as the others
    """Too much waits already."""


@dataclass(slots=True)
class QueuedRequest:
    """One measurement that is waited for. ``asked`` has when each session last asked."""

    spec: RunSpec
    since: float
    asked: dict[str, float] = field(default_factory=dict)
    is_teachers: bool = False
    is_kept: bool = False  # also when no page asks again


class ClassQueue:
    """The measurements that a class waits for: each is asked for once, and one at a time is made.

        queue.ask(spec, "session 7")     # "" while it waits, the run's id once there is one
        queue.place(spec)                # 3

    Requests wait here, in the server, and not as processes that have loaded torch (300 MB each). A
    request is started when no other run is under way. The teacher's come first, then sessions take
    turns: who has had fewer measurements is before who has had more. Equal requests are one, no
    matter who asks; it is dropped when no page has asked again for a while, because the page that
    waits asks every second and a closed browser does not.

    Thread-safe. ``find`` gives the run that answers a spec already, ``launch`` starts one and
    returns its id once the store has it, ``is_free`` says whether nothing else is under way."""

    def __init__(
        self,
        find: Callable[[RunSpec], str],
        launch: Callable[[RunSpec], str],
        is_free: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find, self._launch, self._is_free, self._clock = find, launch, is_free, clock
        self._lock = threading.RLock()
        self._requests: dict[RunSpec, QueuedRequest] = {}
        self._served: dict[str, int] = {}  # measurements that a session has had
        self._order: list[QueuedRequest] | None = None
        self._thread: threading.Thread | None = None

    def ask(
        self, spec: RunSpec, who: str, *, teacher: bool = False, again: bool = False,
        kept: bool = False,
    ) -> str:  # fmt: skip
        """The run that answers ``spec``, or "" while it waits. ``again`` asks for a new one.

        Raises QueueFull when the session or the whole class waits for too much.
        """
        with self._lock:
            self._forget()
            request = self._requests.get(spec)
            if request is None:
                known = "" if again else self._find(spec)
                if known:
                    return known
                self._check(who, teacher)
                request = self._requests[spec] = QueuedRequest(spec, self._clock())
                self._order = None
            is_change = teacher > request.is_teachers or who not in request.asked
            request.asked[who] = self._clock()
            request.is_teachers |= teacher
            request.is_kept |= kept or again
            self._order = None if is_change else self._order
            self._begin()
            return ""

    def waiting(self) -> list[QueuedRequest]:
        """In the order in which they will be made."""
        with self._lock:
            self._forget()
            if self._order is None:
                self._order = self._in_order()
            return list(self._order)

    def place(self, spec: RunSpec) -> int:
        """1 for the next; 0 for what does not wait."""
        return next((n for n, r in enumerate(self.waiting(), 1) if r.spec == spec), 0)

    def withdraw(self, spec: RunSpec) -> None:
        """Take a request out, no matter who waits for it."""
        with self._lock:
            self._requests.pop(spec, None)
            self._order = None

    def start_next(self) -> bool:
        """Start the first request if nothing else is under way; False when nothing waits."""
        with self._lock:
            order = self.waiting()
            if order and self._is_free():
                self._start(order[0])
            return bool(order)

    def _start(self, request: QueuedRequest) -> None:
        self.withdraw(request.spec)
        for who in request.asked:
            self._served[who] = self._served.pop(who, 0) + 1
        for who in list(self._served)[:-MAX_SERVED]:
            del self._served[who]
        try:
            self._launch(request.spec)
        except AmpscopeError:
            logger.exception("A measurement of the class could not be started")

    def _in_order(self) -> list[QueuedRequest]:
        served, rest, order = dict(self._served), list(self._requests.values()), []
        while rest:
            turn = min(rest, key=lambda r: (not r.is_teachers, _turns(r, served), r.since))
            rest.remove(turn)
            order.append(turn)
            served.update({who: served.get(who, 0) + 1 for who in turn.asked})
        return order

    def _forget(self) -> None:
        oldest = self._clock() - KEPT_S
        for request in list(self._requests.values()):
            gone = [who for who, asked in request.asked.items() if asked < oldest]
            if gone and not request.is_kept:
                self._order = None
                for who in gone:
                    del request.asked[who]
                if not request.asked:
                    del self._requests[request.spec]

    def _check(self, who: str, teacher: bool) -> None:
        own = sum(who in request.asked for request in self._requests.values())
        if own >= MAX_OF_ONE and not teacher:
            raise QueueFull(
                f"You wait for {own} measurements already. This one begins when one of them is "
                "made; leave this page open."
            )
        if len(self._requests) >= MAX_WAITING and not teacher:
            raise QueueFull(
                f"The class waits for {len(self._requests)} measurements already. Leave this page "
                "open, or look at a lesson that has been measured."
            )

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ampscope-class", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        """Until nothing waits any more."""
        said = ""
        while True:
            try:
                with self._lock:
                    if not self.start_next():
                        self._thread = None
                        return
                said = ""
            except Exception as error:  # an unreadable store: the pages say so; it may come back
                if str(error) != said:
                    logger.exception("The class's queue could not look at the store")
                said = str(error)
            time.sleep(LOOK_EVERY_S)


def _turns(request: QueuedRequest, served: dict[str, int]) -> int:
    """Of the waiting user who has had the fewest."""
    return min((served.get(who, 0) for who in request.asked), default=0)
