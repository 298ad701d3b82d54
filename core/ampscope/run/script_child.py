"""One run of a script in a child process: from the queued run to the recorded outcome."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from ampscope.errors import AmpscopeError, BadInput, StoreError
from ampscope.observations import Attempt, Outcome
from ampscope.records import Machine, RunSpec, State, StepRecord
from ampscope.run.device import choose_device, choose_policy, describe, limit_memory
from ampscope.run.script import ScriptResult, run_script
from ampscope.run.watchdog import Watchdog
from ampscope.store.writer import RunWriter

HANG_FACTOR = 1.5  # the script's own time limit counts at optimizer steps; this one always
EXIT_FAILED = 2


def run_child(store: Path, run_id: str, spec: RunSpec) -> int:
    """Run the script of a queued run and write what happened. Returns an exit status."""
    writer = RunWriter(store, run_id)
    writer.adopt()
    machine = _machine(spec)
    written = [0]

    def keep(result: ScriptResult) -> None:
        _write(writer, result)

    def beat(count: int) -> None:
        written[0] = count

    state, message, details = State.FINISHED, "", ""
    try:
        with Watchdog(writer, spec.time_limit_s * HANG_FACTOR + 5) as watchdog:
            limit_memory(spec.memory_limit_mib)
            writer.start(machine)
            watchdog.start_clock()
            result = run_script(spec, machine.policy, beat, keep)
            _write(writer, result)
            details = result.traceback
    except KeyboardInterrupt:
        state, message = State.CANCELLED, "Cancelled by a signal."
    except (BadInput, StoreError) as error:
        state, message = State.FAILED, str(error)
    except BaseException as error:
        state, message = State.FAILED, f"ampscope failed: {type(error).__name__}: {error}"
        details = traceback.format_exc()
    try:
        writer.finish(state, message, details)
    except AmpscopeError:
        return EXIT_FAILED
    return 0


def _machine(spec: RunSpec) -> Machine:
    device = choose_device("auto")
    import dataclasses

    policy = choose_policy("cuda" if spec.policy == "cuda" else "native", device)
    return dataclasses.replace(describe(spec, device), policy=policy)


def _write(writer: RunWriter, result: ScriptResult) -> None:
    writer.add_observations(result.observations)
    for record in result.observations:
        if isinstance(record, Attempt):
            writer.add_step(
                StepRecord(
                    step=record.attempt,
                    loss=record.loss,
                    scale=record.scale if record.scaler else None,
                    skipped=record.skipped,
                    grad_norm=record.grad_norm if not record.grad_nonfinite else float("nan"),
                    lr=record.lr,
                    moved_share=record.moved_share,
                )
            )
    writer.flush()


def outcome_of(result: ScriptResult) -> Outcome:
    """The closing record of a run."""
    last = result.observations[-1]
    assert isinstance(last, Outcome)
    return last


def detach_output(path: Path) -> None:
    """Send this process's output to a file, and give it no input."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
