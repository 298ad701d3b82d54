"""The frame of a child that works once its turn has come: adopt, watch, wait, write how it ended.

For torch and for other frameworks, whose Pythons have neither torch nor click. Whatever happens
within, the parent and the store survive it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from ampscope.errors import AmpscopeError, Cancelled, StoreError
from ampscope.privacy import taken
from ampscope.records import Machine, RunSpec, State
from ampscope.run.turn import device_turn
from ampscope.run.watchdog import NOT_BEGUN, Watchdog
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

EXIT_FAILED = 1

Work = Callable[[RunWriter, RunSpec, Path, Watchdog], str]
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


@contextlib.contextmanager
def turn(writer: RunWriter, store: Path, machine: Machine, watchdog: Watchdog) -> Iterator[None]:
    """Hold the machine's device once the queue allows it; the run and its clock start then.

    Raises Cancelled when the run is cancelled before.
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

        with device_turn(machine.device, is_next):
            writer.start(machine)
            watchdog.start_clock()
            yield


def text_of(error: BaseException) -> str:
    """Its type and first line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def _raise_cancelled(number: int, frame: FrameType | None) -> None:
    raise Cancelled("Cancelled by a signal.")
