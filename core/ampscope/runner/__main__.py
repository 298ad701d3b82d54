"""Child process of a probe or a measurement: ``python -m ampscope.runner --store FILE --run ID``.

Without a run it loads torch and reads one from standard input, whose end ends it.

The parent has registered the run; this process adopts it, waits for its device's turn, trains or
measures, and writes how it ended. Whatever happens here, the parent and the store survive it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from ampscope.runner.run_server import end_with_parent

end_with_parent()  # before torch is loaded, which takes seconds

import torch  # noqa: E402

from ampscope import extensions  # noqa: E402
from ampscope.measurements import KINDS  # noqa: E402
from ampscope.records import RunSpec  # noqa: E402
from ampscope.runner.child_frame import Watchdog, run_queued, text_of, turn  # noqa: E402
from ampscope.store.writer import RunWriter  # noqa: E402


@click.command()
@click.option("--store", type=click.Path(path_type=Path), required=True)
@click.option("--run", "run_id", default="")
def main(store: Path, run_id: str) -> None:
    """Run the queued probe RUN_ID of STORE."""
    run_id = run_id or _told()
    sys.exit(run_queued(store, run_id, _run, _sentence) if run_id else 0)


def _told() -> str:
    """The run that the parent names when it has one; "" if it never does."""
    import torch

    from ampscope.runner.probe import preload

    if "lesson" in KINDS:  # the likeliest to be asked for
        extensions.load(KINDS["lesson"].measure)
    preload(torch.device("cpu"))
    told = sys.stdin.readline().strip()
    with open(os.devnull) as nothing:  # as for a child that was given its run at once
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return told


def _run(writer: RunWriter, spec: RunSpec, store: Path, watchdog: Watchdog) -> str:
    """Wait for the device's turn and work; one sentence on what could not be recorded."""
    # Loading takes longer than many a probe; it is done while other runs may hold the device.
    import torch

    from ampscope.capture.exponent_count import prepare
    from ampscope.policy.autocast_lists import resolve
    from ampscope.runner.device import choose_device, describe, sample_telemetry, uuid_of
    from ampscope.runner.probe import preload

    device = choose_device(spec.device)
    for precision in spec.precisions:
        resolve(precision, device.type)
    machine, uuid = describe(spec, device), uuid_of(device)
    # In the queue a GPU goes by its UUID: "cuda:0" may be another one for the run in front.
    writer.wait_for(replace(machine, device=f"cuda {uuid}") if uuid else machine)
    preload(device)
    with turn(writer, store, machine, watchdog, uuid):
        if device.type == "cuda":  # not before: it takes memory there
            torch.cuda.set_device(device)  # what names no device is meant for this one
        counter = prepare(device) if spec.is_training else ""  # before the first step
        with sample_telemetry(store, writer.run_id, device) as readings:
            note = _work(writer, spec, device, watchdog.cancelled.is_set)
        return " ".join(filter(None, (counter, note, readings.note)))


def _work(
    writer: RunWriter, spec: RunSpec, device: torch.device, is_cancelled: Callable[[], bool]
) -> str:
    """What kind of run it is decides who does it."""
    from ampscope.runner.device import choose_policy, limit_memory
    from ampscope.runner.probe import drive, prepare

    if not spec.is_training:  # a child imports the one measurement that it does
        measure = extensions.load(KINDS[spec.kind].measure)
        note: str = measure(spec, device, writer, is_cancelled)
        return note
    limit_memory(spec.memory_limit_mib, device.type)
    policy = choose_policy(spec.policy, device)
    return drive(spec, prepare(spec, device), policy, writer, is_cancelled).note


def _sentence(error: BaseException, spec: RunSpec) -> str:
    text = text_of(error)
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


if __name__ == "__main__":
    main()
