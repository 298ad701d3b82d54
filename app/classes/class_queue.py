"""The measurements that a class waits for: each is asked for once, and one at a time is made.

    queue.ask(spec, "session 7")     # "" while it waits, the run's id once there is one
    queue.place(spec)                # 3

Requests wait here, in the server, and not as processes that have loaded torch (300 MB each). A
request is started when no other run is under way. The teacher's come first, then sessions take
turns: who has had fewer measurements is before who has had more. Equal requests are one, whoever
asks; it is dropped when nobody has asked again for a while, because the page that waits asks every
second and a closed browser does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ampscope.errors import AmpscopeError
from ampscope.records import RunSpec

MAX_WAITING = 40  # all lessons in all settings are about as many
MAX_OF_ONE = 3  # lessons that one session waits for: more is leafing through, not waiting
KEPT_S = 20.0  # a browser's clock may stand still for some seconds when its machine is busy
LOOK_EVERY_S = 0.2
MAX_SERVED = 1_000  # sessions whose turns are remembered
logger = logging.getLogger("ampscope.dashboard")


class Full(AmpscopeError):  # noqa: N818  # says what happened, as the others
    """Too much waits already."""


@dataclass(slots=True)
class Request:
    """One measurement that is waited for. ``asked`` has when each session last asked."""

    spec: RunSpec
    since: float
    asked: dict[str, float] = field(default_factory=dict)
    is_teachers: bool = False
    is_kept: bool = False  # also when nobody asks again


class ClassQueue:
    """Thread-safe. ``find`` gives the run that answers a spec already, ``launch`` starts one and
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
        self._requests: dict[RunSpec, Request] = {}
        self._served: dict[str, int] = {}  # measurements that a session has had
        self._order: list[Request] | None = None
        self._thread: threading.Thread | None = None

    def ask(
        self, spec: RunSpec, who: str, *, teacher: bool = False, again: bool = False,
        kept: bool = False,
    ) -> str:  # fmt: skip
        """The run that answers ``spec``, or "" while it waits. ``again`` asks for a new one.

        Raises Full when the session or the whole class waits for too much.
        """
        with self._lock:
            self._forget()
            request = self._requests.get(spec)
            if request is None:
                known = "" if again else self._find(spec)
                if known:
                    return known
                self._check(who, teacher)
                request = self._requests[spec] = Request(spec, self._clock())
                self._order = None
            is_change = teacher > request.is_teachers or who not in request.asked
            request.asked[who] = self._clock()
            request.is_teachers |= teacher
            request.is_kept |= kept or again
            self._order = None if is_change else self._order
            self._begin()
            return ""

    def waiting(self) -> list[Request]:
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
        """Take a request out, whoever waits for it."""
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

    def _start(self, request: Request) -> None:
        self.withdraw(request.spec)
        for who in request.asked:
            self._served[who] = self._served.pop(who, 0) + 1
        for who in list(self._served)[:-MAX_SERVED]:
            del self._served[who]
        try:
            self._launch(request.spec)
        except AmpscopeError:
            logger.exception("A measurement of the class could not be started")

    def _in_order(self) -> list[Request]:
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
            raise Full(
                f"You wait for {own} measurements already. This one begins when one of them is "
                "made; leave this page open."
            )
        if len(self._requests) >= MAX_WAITING and not teacher:
            raise Full(
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


def _turns(request: Request, served: dict[str, int]) -> int:
    """Of whoever among those who ask has had the fewest."""
    return min((served.get(who, 0) for who in request.asked), default=0)
