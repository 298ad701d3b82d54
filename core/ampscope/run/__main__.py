"""Child process of a probe or a measurement: ``python -m ampscope.run --store FILE --run ID``.

The parent has registered the run; this process adopts it, waits for its device's turn, trains or
measures, and writes how it ended. Whatever happens here, the parent and the store survive it.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from ampscope.errors import AmpscopeError, Cancelled, StoreError
from ampscope.records import RunSpec, State
from ampscope.run.watchdog import NOT_BEGUN, Watchdog
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

if TYPE_CHECKING:
    import torch

EXIT_FAILED = 1


@click.command()
@click.option("--store", type=click.Path(path_type=Path), required=True)
@click.option("--run", "run_id", required=True)
def main(store: Path, run_id: str) -> None:
    """Run the queued probe RUN_ID of STORE."""
    signal.signal(signal.SIGINT, _raise_cancelled)
    signal.signal(signal.SIGTERM, _raise_cancelled)
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
    """Run, and turn whatever happened into a state with one sentence."""
    state, message, details = State.FINISHED, "", ""
    try:
        with Watchdog(writer, spec.time_limit_s) as watchdog:
            message = _run(writer, spec, store, watchdog)
    except Cancelled as cancelled:
        state, message = State.CANCELLED, str(cancelled)
    except StoreError as error:
        print(error, file=sys.stderr)
        state, message = State.FAILED, str(error)
    except AmpscopeError as error:
        state, message, details = State.FAILED, str(error), traceback.format_exc()
    except BaseException as error:
        state, message, details = State.FAILED, _sentence(error, spec), traceback.format_exc()
    try:
        writer.finish(state, message, details)
    except StoreError as error:  # a full disk: the reader will show the run as lost
        print(error, file=sys.stderr)
        return EXIT_FAILED
    return 0 if state is State.FINISHED else EXIT_FAILED


def _run(writer: RunWriter, spec: RunSpec, store: Path, watchdog: Watchdog) -> str:
    """Wait for the device's turn and work; one sentence on what could not be recorded."""
    # Loading takes longer than many a probe; it is done while other runs may hold the device.
    import torch

    from ampscope.policy.modes import resolve
    from ampscope.run.device import choose_device, describe
    from ampscope.run.probe import preload
    from ampscope.run.readings import read_beside
    from ampscope.run.turn import device_turn

    device = choose_device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and allocations without a device are meant for it
    for precision in spec.precisions:
        resolve(precision, device.type)
    machine = describe(spec, device)
    writer.wait_for(machine)
    preload(device)

    with Reader(store) as reader:

        def is_next() -> bool:
            if not reader.is_next(writer.run_id):
                if watchdog.cancelled.is_set():
                    raise Cancelled(NOT_BEGUN)
                return False
            if writer.beat():  # asked now: of runs that were cancelled together, none may start
                raise Cancelled(NOT_BEGUN)
            return True

        with device_turn(str(device), is_next):
            writer.start(machine)
            watchdog.start_clock()
            with read_beside(store, writer.run_id, device) as readings:
                note = _work(writer, spec, device, watchdog.cancelled.is_set)
            return f"{note} {readings.note}".strip()


def _work(
    writer: RunWriter, spec: RunSpec, device: torch.device, is_cancelled: Callable[[], bool]
) -> str:
    """What kind of run it is decides who does it."""
    from ampscope.run.device import choose_policy, limit_memory
    from ampscope.run.probe import drive, prepare

    if not spec.is_training:
        from ampscope.measure.kinds import measure

        return measure(spec, device, writer, is_cancelled)
    limit_memory(spec.memory_limit_mib)
    policy = choose_policy(spec.policy, device)
    return drive(spec, prepare(spec, device), policy, writer, is_cancelled).note


def _sentence(error: BaseException, spec: RunSpec) -> str:
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    if (
        isinstance(error, MemoryError)
        or "can't allocate memory" in str(error)
        or (type(error).__name__ == "OutOfMemoryError")
    ):
        limit = f" (limit {spec.memory_limit_mib} MiB)" if spec.memory_limit_mib else ""
        return f"Out of memory{limit}. Use a smaller size, fewer instruments, or a higher limit."
    if isinstance(error, SystemExit):
        return f"The workload called sys.exit({error.code}). Remove that call from it."
    if not spec.is_training:
        return f"The measurement raised {text}. The traceback is kept with the run."
    return f"The training step raised {text}. The traceback is kept with the run."


def _raise_cancelled(number: int, frame: FrameType | None) -> None:
    raise Cancelled("Cancelled by a signal.")


if __name__ == "__main__":
    main()
