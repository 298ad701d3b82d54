"""Hands records to a thread of its own, which writes the store: training never waits for a disk.

The thread flushes twice a second and gives the sign of life. When the disk falls so far behind
that :data:`MOST_WAITING` records wait, training does wait: no step is lost. While another program
holds the store, records wait for it; at the begin and at the end the training waits with them for 3
seconds. When the store cannot be opened or fails (a full disk) the run's recording ends, with one
warning; the training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ampscope.errors import StoreBusy, StoreError
from ampscope.records import Event, Machine, ModuleRecord, RunSpec, State, StepRecord
from ampscope.store.processes import HEARTBEAT_EVERY_S
from ampscope.store.writer import FLUSH_EVERY_S, RunWriter, new_run_id
from ampscope.telemetry.sampler_process import Readings
from ampscope.watcher.alarms import warn
from ampscope.watcher.step import ClosedStep

MOST_WAITING = 20_000  # records; about 200 MB of frames of 200 modules
MAX_MESSAGE = 500
HELD_S = 3.0  # that the training waits at its begin or end for another program with the store
PATIENCE_S = 30.0  # that records wait for it
_TRY_S = 1.0  # of that in one go: the end of a run waits for the present one
_WAIT_S = 0.01


class Recorder:
    """One run in a store; every method but :meth:`close` returns at once. Where the store cannot be
    opened it takes everything and records nothing."""

    _writer: RunWriter  # while there is no error

    def __init__(self, path: Path, spec: RunSpec, machine: Machine) -> None:
        self.error = ""  # why nothing more is recorded, once that is so
        self._has_said = False
        self.is_cancelled = False  # a user asked the run to stop
        self._flushed: Callable[[], None] | None = None
        self.readings = Readings()  # of the machine; on CUDA a process reads it
        self.run_id, self.path = new_run_id(), path
        self._waiting: deque[Callable[[], None]] = deque()
        self._held_since: float | None = None  # by another program
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ampscope-recorder", daemon=True)
        self._closing: weakref.WeakMethod[Callable[[State, str], None]] | None = None
        try:
            self._open(spec, machine)
        except StoreError as error:
            self._begins_without(str(error))
            return
        except Exception as error:  # a name that no file can have, a limit of threads
            self._begins_without(f"{path!s:.200}: {type(error).__name__}: {error!s:.200}")
            return
        atexit.register(self._left)

    def _begins_without(self, why: str) -> None:
        self._fail(why)
        self._stop.set()
        self._say()

    def _open(self, spec: RunSpec, machine: Machine) -> None:
        try:
            self.path = self.path.expanduser()
        except RuntimeError:
            self.path = Path(os.devnull, self.path)  # nothing is to be kept beside it either
            raise
        writer = RunWriter.create(self.path, spec, self.run_id, HELD_S)
        self.path = writer.path
        try:
            writer.start(machine)
            writer.wait_at_most(_TRY_S)
            self._writer = writer
            self._thread.start()
        except StoreError:
            writer.close()
            raise
        except Exception as error:
            with contextlib.suppress(StoreError):
                writer.finish(State.FAILED, f"Nothing was recorded: {error!s:.200}")
            with contextlib.suppress(StoreError):
                writer.close()
            raise

    def close_by(self, closing: Callable[[State, str], None]) -> None:
        """What to call where the process ends and nothing has closed the run; held weakly."""
        self._closing = weakref.WeakMethod(closing)

    def after_each_flush(self, call: Callable[[], None]) -> None:
        """Call ``call`` in the thread whenever it has written; it replaces an earlier one."""
        self._flushed = call

    def machine(self, machine: Machine) -> None:
        """Where the run takes place, when that has changed before its first step."""
        self._put(lambda: self._writer.wait_for(machine))

    def modules(self, records: Sequence[ModuleRecord]) -> None:
        """The modules of all models."""
        self._put(lambda: self._writer.add_modules(records))

    def step(self, record: StepRecord, closed: ClosedStep) -> None:
        """A step with everything that was seen in it: it is written whole or not at all."""

        def write() -> None:
            for event in closed.numbers.events:  # may ask the store, which may be held: first
                self._writer.add_event(event)
            self._writer.add_step(record)
            for frame in closed.frames.values():
                self._writer.add_frame(frame)
            self._writer.add_nonfinite(closed.nonfinite)
            self._writer.add_shadow(closed.shadows())
            self._writer.add_ops(*closed.ops())

        self._put(write)

    def event(self, event: Event) -> None:
        """Something that belongs to no step's numbers."""
        self._put(lambda: self._writer.add_event(event))

    def later(self, work: Callable[[], None]) -> None:
        """Do something slow in the thread, in order with the records; at once where nothing is
        recorded any more."""
        self._put(work)
        if self.error:
            work()

    def wait(self, timeout_s: float = 5.0) -> None:
        """Until what was handed over so far can be read."""
        done = threading.Event()

        def flushed() -> None:
            self._writer.flush()
            done.set()

        self._put(flushed)
        done.wait(timeout_s if self._thread.is_alive() else 0.0)

    def close(self, state: State, message: str = "") -> None:
        """Write what waits and how the run ended."""
        if self._stop.is_set() or os.getpid() != self._pid:  # a fork has no thread
            return
        atexit.unregister(self._left)
        until = time.monotonic() + HELD_S
        self._stop.set()
        self._thread.join()
        message = f"{message} {self.readings.stop()}".strip()
        if self.error:  # the disk may have room again: say at least how it ended
            message = f"Recording ended early: {self.error}"
        try:
            self._writer.wait_at_most(until - time.monotonic())
            if not self.error:
                self._write()  # what another program kept the thread from writing
            self._writer.finish(state, message)
            self._writer.close()
        except StoreError as error:
            self._fail(self.error or error)
        except Exception as error:  # the training goes on whatever is wrong here
            self._fail(f"{type(error).__name__}: {error}")
        self._say()

    def _left(self) -> None:
        """The process ends and the run was not closed."""
        error = getattr(sys, "last_value", None)  # Python keeps there what ended the program
        close = (self._closing and self._closing()) or self.close
        if error is None:
            close(State.FINISHED, "The process ended without run.close().")
        else:
            text = f"The training raised {type(error).__name__}: {error}"
            close(State.FAILED, text[:MAX_MESSAGE])

    def _put(self, work: Callable[[], None]) -> None:
        if os.getpid() != self._pid:
            return
        if self.error:
            self._say()
            return
        while len(self._waiting) >= MOST_WAITING and not self.error and self._thread.is_alive():
            time.sleep(_WAIT_S)
        self._waiting.append(work)

    def _run(self) -> None:
        beaten = 0.0
        while not self.error:
            stopping = self._stop.wait(FLUSH_EVERY_S)
            try:
                self._write()
                with contextlib.suppress(Exception):  # a figure that fails costs no record
                    if self._flushed is not None:
                        self._flushed()
                if time.monotonic() - beaten >= HEARTBEAT_EVERY_S:
                    beaten = time.monotonic()
                    self.is_cancelled |= self._writer.beat()
                self._held_since = None
            except StoreBusy as error:
                self._held(error, stopping=stopping)
            except StoreError as error:
                self._fail(error)
            except Exception as error:  # the training goes on whatever is wrong here
                self._fail(StoreError(f"its thread failed ({type(error).__name__}: {error})."))
            if stopping:
                return

    def _held(self, error: StoreBusy, *, stopping: bool) -> None:
        """Another program holds the store: what waits is tried again, within limits."""
        now = time.monotonic()
        self._held_since = self._held_since or now
        is_late = now - self._held_since > PATIENCE_S or len(self._waiting) >= MOST_WAITING
        if is_late and not stopping:
            self._fail(error)

    def _write(self) -> None:
        while self._waiting:
            self._waiting[0]()
            self._waiting.popleft()  # if it was done
        self._writer.flush()
        if not self.path.exists():  # SQLite would go on writing to a file that has no name
            raise StoreError(f"{self.path} was deleted.")

    def _fail(self, error: StoreError | str) -> None:
        self.error = str(error)
        self._waiting.clear()

    def _say(self) -> None:
        """Once, in the thread that trains."""
        if self.error and not self._has_said:
            self._has_said = True
            warn(f"ampscope records no more: {self.error}")
