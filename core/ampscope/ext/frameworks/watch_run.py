"""The run of one watched training in the store: written beside the training, never in its way.

Where the store fails (a full disk, a locked file), one warning says so and the training goes on
unrecorded. A thread beats for the run and writes its end: a ``fit`` that was left is noticed at any
moment, also in the middle of a write.

:func:`on_leaving` notices how a framework's ``fit`` ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ampscope.errors import AmpscopeError, BadInput
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.records import Cadence, Event, Machine, RunSpec, State, watched
from ampscope.store.db import default_path
from ampscope.store.processes import HEARTBEAT_EVERY_S
from ampscope.store.writer import FLUSH_EVERY_S, Pace, RunWriter

WRITING_SHARE = 0.01  # of the training's time goes into writing at most
HELD_S = 3.0  # that a training waits for another program with the store
LONGEST_END_S = 65.0  # a slow disk
_NOTHING = Cadence(histogram=0, trace=0, shadow=0)


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What a watch of any framework is given."""

    store: Path | str
    histograms_every: int
    label: str

    @classmethod
    def of(cls, store: str | Path | None, histograms_every: int, label: str) -> WatchOptions:
        """Raises BadInput for a negative number of steps."""
        if histograms_every < 0:
            raise BadInput("histograms_every is a number of steps, or 0 for none.")
        chosen = default_path() if store is None else os.path.expanduser(store)
        return cls(chosen, histograms_every, label)

    def spec(self, framework: str, name: str = "") -> RunSpec:
        """The run as the store lists it; ``name`` where the user gave no label."""
        spec = watched(sys.argv[0], self.histograms_every, self.label or name)
        return replace(spec, framework=framework)


class WatchRun:
    """One run; every method does nothing once it is closed."""

    def __init__(
        self, store: Path | str, spec: RunSpec, machine: Callable[[RunSpec], Machine]
    ) -> None:
        self.writer = RunWriter.create(store, spec, wait_s=HELD_S)
        try:
            self.writer.start(machine(spec))
            self.writer.wait_at_most(HELD_S / 3)  # once at a write, twice at the end
        except BaseException:
            self.writer.close()
            raise
        self.run_id = self.writer.run_id
        self.is_open = True
        self.away_s = 0.0  # in which nothing was watched, and no writing can be due
        self._pace = Pace(WRITING_SHARE, shortest_s=FLUSH_EVERY_S)
        self._ending = State.FINISHED, "", ""
        self._unwritten = ""  # why the end is not in the store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ampscope-heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def opened(
        cls, options: WatchOptions, spec: RunSpec, machine: Callable[[RunSpec], Machine]
    ) -> WatchRun | None:
        """None, after a warning, where the store cannot be written."""
        try:
            return cls(options.store, spec, machine)
        except Exception as error:
            words = f"ampscope does not record this training: {_sentence(error)}"
            warnings.warn(words, stacklevel=3)
            return None

    def note(self, text: str, step: int = 0) -> None:
        """What cannot be seen, and why."""
        if self.is_open:
            self.writer.add_event(Event(step, "note", "cannot be seen", text))

    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """An error of ampscope's own ends the recording, and not the training."""
        try:
            yield
        except Exception as error:
            self.close(State.FAILED, f"The recording ended early: {_sentence(error)}")
            words = f"ampscope records no more of this training: {_sentence(error)}"
            warnings.warn(words, stacklevel=3)

    def keep(self, recorder: FrameworkRecorder) -> None:
        """Write what ``recorder`` has, if that is due; what is written, it forgets."""
        if not self.is_open or self._pace.is_due(self._now()):
            self.take(recorder)
            self.write_if_due()

    def take(self, recorder: FrameworkRecorder) -> None:
        """Take everything from ``recorder``, to be written next."""
        with self.contained():
            measured = recorder.take()
            recorder.forget()
            if self.is_open:
                measured.write(self.writer)
            else:
                recorder.cadence = _NOTHING  # the instruments stay on, and look at little

    def write_if_due(self) -> None:
        """Write what is pending, unless that was done a moment ago."""
        now = self._now()
        if not self.is_open or not self._pace.is_due(now):
            return
        with self.contained():
            self.writer.flush()
        self._pace.wrote(now, self._now() - now)

    def _now(self) -> float:
        return time.monotonic() - self.away_s

    def failed(self, error: BaseException) -> None:
        """The training itself raised."""
        words = f"The training raised {first_words(error)}. Its traceback is kept."
        self.close(State.FAILED, words, "".join(traceback.format_exception(error)))

    def left(self, error: BaseException | None) -> None:
        """A ``fit`` was left by an exception, which may not be known."""
        if error is not None:
            self.failed(error)
        else:
            words = "fit was left by an exception outside the training steps."
            self.close(State.FAILED, words)

    def close(self, state: State, message: str = "", details: str = "") -> None:
        """Once; what is pending is written before."""
        if not self.is_open:
            return
        self.is_open = False
        self._ending = state, message, details
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(LONGEST_END_S)
        if self._unwritten:
            words = f"ampscope has not recorded the end of this training: {self._unwritten}"
            warnings.warn(words, stacklevel=2)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_EVERY_S):
            with contextlib.suppress(AmpscopeError):
                self.writer.beat()
        try:
            self.writer.finish(*self._ending)
        except AmpscopeError as error:  # what was pending is given up; the state may still fit
            self._unwritten = _sentence(error)
            with contextlib.suppress(AmpscopeError):
                self.writer.finish(State.FAILED, f"The recording ended early: {error}")
        with contextlib.suppress(AmpscopeError):
            self.writer.close()


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, AmpscopeError) else repr(error)


def first_words(error: BaseException) -> str:
    """Of a message; TensorFlow's begins with where a graph was traced, which is not what failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Graph execution error"):
        lines = [
            x for x in lines[1:] if re.match(r"[\w.]+(Error|Exception|Interrupt): ", x)
        ] or lines
    words = lines[0][:300].rstrip(".:") if lines else ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def on_leaving(kind: type, left: Callable[[BaseException | None], None]) -> Callable[[], object]:
    """Have ``left`` called when the ``fit`` that calls us is over, whatever ended it, with the
    exception if it can be had. The answer calls that off.

    The list of callbacks, a ``kind``, lives as long as ``fit`` does, and no other code holds it.
    """
    callbacks = _calling(kind)
    if callbacks is None:
        return lambda: None
    before = _errors()  # of an earlier cell of a notebook, or of what is being handled now
    return weakref.finalize(callbacks, lambda: left(_new_error(before))).detach


def _calling(kind: type) -> object:
    """The ``kind`` that calls us, found among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    return None


def _errors() -> list[BaseException]:
    """The one that is being handled, and the last unhandled one."""
    found = sys.exc_info()[1], getattr(sys, "last_value", None)
    return [error for error in found if isinstance(error, BaseException)]


def _new_error(before: list[BaseException]) -> BaseException | None:
    return next((e for e in _errors() if not any(e is old for old in before)), None)
