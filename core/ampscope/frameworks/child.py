"""Child process of a probe: ``python -m ampscope.frameworks.child --store FILE --run ID``.

The same steps as ``ampscope.run``: adopt the run, wait for the device's turn, train, write how it
ended. It runs under the framework's own Python.
"""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from ampscope.errors import AmpscopeError, Cancelled, StoreError
from ampscope.frameworks.adapters import load
from ampscope.frameworks.arguments import store_and_run
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.writing import Writing
from ampscope.records import RunSpec, State
from ampscope.run.turn import device_turn
from ampscope.run.watchdog import NOT_BEGUN, Watchdog
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

EXIT_FAILED = 1


def main() -> None:
    """Run the queued probe."""
    signal.signal(signal.SIGINT, _raise_cancelled)
    signal.signal(signal.SIGTERM, _raise_cancelled)
    store, run_id = store_and_run()
    try:
        with Reader(store) as reader:
            spec = reader.run(run_id).spec
        writer = RunWriter(store, run_id)
        writer.adopt()
    except (AmpscopeError, Cancelled) as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_FAILED)
    sys.exit(_conclude(writer, spec, store))


def _conclude(writer: RunWriter, spec: RunSpec, store: Path) -> int:
    state, message, details = State.FINISHED, "", ""
    try:
        with Watchdog(writer, spec.time_limit_s) as watchdog:
            message = _run(writer, spec, store, watchdog)
    except Cancelled as cancelled:
        state, message = State.CANCELLED, str(cancelled)
    except AmpscopeError as error:
        state, message, details = State.FAILED, str(error), traceback.format_exc()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        state, message = State.FAILED, f"The training step raised {text}. Its traceback is kept."
        details = traceback.format_exc()
    try:
        writer.finish(state, message, details)
    except StoreError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    return 0 if state is State.FINISHED else EXIT_FAILED


def _run(writer: RunWriter, spec: RunSpec, store: Path, watchdog: Watchdog) -> str:
    adapter = load(spec.framework)
    machine = adapter.machine(spec)
    writer.wait_for(machine)
    recorder = Recorder(spec.cadence)
    writing = Writing(writer, recorder, keeps_evidence=False)
    recorder.on_step = lambda steps: writing.write_if_due()
    with Reader(store) as reader:

        def is_next() -> bool:
            if watchdog.cancelled.is_set():
                raise Cancelled(NOT_BEGUN)
            return reader.is_next(writer.run_id)

        with device_turn(machine.device, is_next):
            writer.start(machine)
            watchdog.start_clock()
            adapter.seed(spec.seed)
            try:
                return adapter.probe(spec, recorder, watchdog.cancelled.is_set)
            finally:
                writing.write(recorder.outcome("returned"))


def _raise_cancelled(number: int, frame: FrameType | None) -> None:
    raise Cancelled("Cancelled by a signal.")


if __name__ == "__main__":
    main()
