"""Heartbeat, cancel and time limit of a child process, in one thread that needs nobody's help.

A step that hangs cannot check anything, so the thread itself ends the process when the limit has
passed; everything flushed before stays in the store. It says where the training stood. Code that
hangs without letting go of Python's lock (in C) stops this thread too: then `faulthandler`, which
needs no lock, ends the process a little later, and the run shows as lost.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
import threading
import time
import traceback
from types import TracebackType

from ampscope.errors import StoreError
from ampscope.records import State
from ampscope.store.processes import HEARTBEAT_EVERY_S
from ampscope.store.writer import RunWriter

HARD_GRACE_S = 15.0  # after the time limit, until the process is ended whatever it does
GRACE_S = 5.0  # how long a cancelled loop may take to reach the end of its step
NOT_BEGUN = "Cancelled before its turn came."
EXIT_TIME_LIMIT = 3
EXIT_CANCELLED = 4


class Watchdog:
    """Beats for the run; sets :attr:`cancelled` when somebody asked it to stop."""

    def __init__(self, writer: RunWriter, time_limit_s: float) -> None:
        self.cancelled = threading.Event()
        self._writer = writer
        self._limit_s = time_limit_s
        self._stop = threading.Event()
        self._started: float | None = None
        self._thread = threading.Thread(target=self._beat, name="ampscope-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stop.set()
        faulthandler.cancel_dump_traceback_later()
        self._thread.join()

    def start_clock(self) -> None:
        """The time limit counts from here: waiting in the queue does not."""
        self._started = time.monotonic()
        with contextlib.suppress(AttributeError, ValueError, io.UnsupportedOperation):
            # Needs a real file to report to; a standard error that is none has no file number.
            faulthandler.dump_traceback_later(self._limit_s + HARD_GRACE_S, exit=True)

    def _beat(self) -> None:
        cancelled_at: float | None = None
        while not self._stop.wait(HEARTBEAT_EVERY_S if cancelled_at is None else 0.1):
            now = time.monotonic()
            try:
                asked = self._writer.beat()
            except StoreError:
                continue  # the loop meets the same error at its next flush and reports it
            if asked and cancelled_at is None:
                cancelled_at = now
                self.cancelled.set()
            if cancelled_at is not None and now - cancelled_at > GRACE_S:
                begun = self._started is not None
                message = "Cancelled in the middle of a step." if begun else NOT_BEGUN
                self._end(EXIT_CANCELLED, State.CANCELLED, message)
            if self._started is not None and now - self._started > self._limit_s:
                message = (
                    f"Stopped at the time limit of {self._limit_s:g} s. Raise it with "
                    "--time-limit; if no step finished for a long time, the step hangs."
                )
                self._end(EXIT_TIME_LIMIT, State.FAILED, message)

    def _end(self, status: int, state: State, message: str) -> None:
        try:
            self._writer.finish(state, message, _where_it_stands())
        finally:
            os._exit(status)


def _where_it_stands() -> str:
    """The main thread's stack: where a step hangs."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    return f"The training stood here (most recent call last):\n{stack}"
