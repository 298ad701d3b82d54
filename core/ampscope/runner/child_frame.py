"""The frame of a child that works once its turn has come: adopt, watch, wait, write how it ended.

For torch and for other frameworks, whose Pythons have neither torch nor click. Whatever happens
within, the parent and the store survive it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ampscope.errors import AmpscopeError, Cancelled, StoreError
from ampscope.privacy import private_folder, taken
from ampscope.records import Machine, RunSpec, State
from ampscope.store.processes import HEARTBEAT_EVERY_S
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

POLL_S = 0.1  # while another run has the device
HARD_GRACE_S = 15.0  # after the time limit, until the process is ended whatever it does
GRACE_S = 5.0  # how long a cancelled loop may take to reach the end of its step
NOT_BEGUN = "Cancelled before its turn came."
EXIT_FAILED, EXIT_TIME_LIMIT, EXIT_CANCELLED = 1, 3, 4

Work = Callable[[RunWriter, RunSpec, Path, "Watchdog"], str]
Sentence = Callable[[BaseException, RunSpec], str]


def run_queued(store: Path, run_id: str, work: Work, sentence: Sentence) -> int:
    """Adopt the run and do its ``work``, which answers with one sentence on what could not be
    recorded; ``sentence`` says what an unexpected error means. Returns an exit status."""
    signal.signal(signal.SIGINT, _raise_cancelled)
    signal.signal(signal.SIGTERM, _raise_cancelled)
    try:
        with Reader(store) as reader:
            spec = taken(run_id, reader.run(run_id).spec)
        writer = RunWriter(store, run_id)
        writer.adopt()
    except (AmpscopeError, Cancelled) as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    state, message, details = State.FINISHED, "", ""
    try:
        with Watchdog(writer, spec.time_limit_s) as watchdog:
            message = work(writer, spec, store, watchdog)
    except Cancelled as cancelled:
        state, message = State.CANCELLED, str(cancelled)
    except StoreError as error:
        print(error, file=sys.stderr)
        state, message = State.FAILED, str(error)
    except AmpscopeError as error:
        state, message, details = State.FAILED, str(error), traceback.format_exc()
    except BaseException as error:
        state, message, details = State.FAILED, sentence(error, spec), traceback.format_exc()
    for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not lose how it ended
        signal.signal(number, signal.SIG_IGN)
    try:
        writer.finish(state, message, details)
    except StoreError as error:  # a full disk: the reader will show the run as lost
        print(error, file=sys.stderr)
        return EXIT_FAILED
    return 0 if state is State.FINISHED else EXIT_FAILED


def _raise_cancelled(number: int, frame: FrameType | None) -> None:
    raise Cancelled("Cancelled by a signal.")


@contextlib.contextmanager
def turn(
    writer: RunWriter, store: Path, machine: Machine, watchdog: Watchdog, uuid: str = ""
) -> Iterator[None]:
    """Hold the machine's device once the queue allows it; the run and its clock start then.

    ``uuid``: of the device, if that is a GPU. Raises Cancelled when the run is cancelled before.
    """
    with Reader(store) as reader:

        def is_next() -> bool:
            if not reader.is_next(writer.run_id):
                if watchdog.cancelled.is_set():
                    raise Cancelled(NOT_BEGUN)
                return False
            if writer.beat():  # asked now: of runs that were cancelled together, none may start
                raise Cancelled(NOT_BEGUN)
            return True

        with device_turn(uuid or machine.device, is_next):
            writer.start(machine)
            watchdog.start_clock()
            yield


@contextlib.contextmanager
def device_turn(device: str, is_next: Callable[[], bool]) -> Iterator[None]:
    """Hold the device. Waits until ``is_next()`` is true and the lock is free; ``is_next`` may
    raise to leave the queue. The kernel releases the lock when its holder dies, however it dies."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    handle = os.open(lock_path(device), flags, 0o600)
    try:
        while not (is_next() and _try_lock(handle)):
            time.sleep(POLL_S)
        yield
    finally:
        os.close(handle)  # releases the lock


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_path(device: str) -> Path:
    """Lock file of a device, shared by all of this user's stores. A GPU is named by its UUID:
    "cuda:0" is another one in every process that has CUDA_VISIBLE_DEVICES set."""
    return private_folder() / f"{device.replace(':', '-')}.lock"


class Watchdog:
    """Beats for the run, in a thread of its own; sets :attr:`cancelled` when a user asked it to
    stop, and ends the process at its time limit.

    A step that hangs cannot check anything, so the thread itself does that; everything flushed
    before stays in the store, and it says where the training stood. Code that hangs without letting
    go of Python's lock (in C) stops this thread too: then `faulthandler`, which needs no lock, ends
    the process a little later, and the run shows as lost."""

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

    def __exit__(self, *error: object) -> None:
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
                if self._started is not None:
                    self._tell(now - self._started)
            except StoreError:
                continue  # the loop meets the same error at its next flush and reports it
            if asked and cancelled_at is None:
                cancelled_at = now
                self.cancelled.set()
            if cancelled_at is not None and now - cancelled_at > GRACE_S:
                message = "Cancelled in the middle of a step." if self._started else NOT_BEGUN
                self._end(EXIT_CANCELLED, State.CANCELLED, message)
            if self._started is not None and now - self._started > self._limit_s:
                message = (
                    f"Stopped at the time limit of {self._limit_s:g} s. Raise it with "
                    "--time-limit; if no step finished for a long time, the step hangs."
                )
                self._end(EXIT_TIME_LIMIT, State.FAILED, message)

    def _tell(self, elapsed_s: float) -> None:
        """Say what the run waits for; called at each beat."""

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


def text_of(error: BaseException) -> str:
    """Its type and first line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The machine around a run, as ``Machine`` records it, the same for every framework."""

    cpu: str  # "Intel(R) Xeon(R) Processor, 2 cores": those that this process may use
    python: str
    platform: str
    host: str


def host_facts() -> HostFacts:
    """Of the machine and Python at hand."""
    # Linux knows the cores that this process may use.
    has_own = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_own else os.cpu_count() or 1
    return HostFacts(
        cpu=f"{_processor()}, {cores} cores",
        python=platform.python_version(),
        platform=platform.platform(),
        host=socket.gethostname(),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
