"""One run of a script in a child process: from the queued run to the recorded outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from ampscope.errors import AmpscopeError, BadInput, StoreError
from ampscope.observations import Observation, Outcome
from ampscope.records import AS_IS, Machine, RunSpec, State
from ampscope.run.device import choose_device, choose_policy, describe, limit_memory
from ampscope.run.private_files import NotPossible, PrivateFiles, wait_for_the_other
from ampscope.run.python_end import end_python
from ampscope.run.readings import read_beside
from ampscope.run.script import Following, OwnFault, ScriptResult, run_script
from ampscope.run.script_ending import ending, passed_limit
from ampscope.run.script_ranks import Ranks, of_first_rank
from ampscope.run.script_writing import ScriptWriting
from ampscope.run.watchdog import Watchdog
from ampscope.store.writer import RunWriter
from ampscope.telemetry.beside import Readings

HANG_FACTOR = 1.5  # the script's own time limit counts at optimizer steps; this one always
HANG_GRACE_S = 5.0
EXIT_FAILED = 2
_LIKELIEST_VICTIM = "1000"  # oom_score_adj(5): the kernel ends this process before any other


def run_child(store: Path, run_id: str, spec: RunSpec, private: Path | None = None) -> int:
    """Run the script of a queued run and write what happened. Returns an exit status.

    ``private``: folder for the script's own view of its files; None lets it write for real.
    """
    files = None
    if private is not None:
        try:
            files = PrivateFiles(spec, store, private)
        except (OSError, NotPossible) as error:
            return _not_private(store, run_id, error)
        store, spec = files.view.store, dataclasses.replace(spec, workload=files.view.workload)
    writer = RunWriter(store, run_id)
    writer.adopt()
    if files is not None:
        files.listen(run_id, lambda: wait_for_the_other(writer))
    writing = ScriptWriting(writer)
    readings = Readings()

    def leaves_at_once(result: ScriptResult) -> None:
        observations = of_first_rank(store, run_id, result.observations) or result.observations
        writing.write(observations, result.measured, last=True)
        readings.stop()
        if result.outcome.ended != "killed":  # the watchdog has said why it ends the process
            writer.finish(*ending(outcome_of(observations), spec, result.processes))

    state, message, details = State.FINISHED, "", ""
    try:
        limit_memory(spec.memory_limit_mib)
        with _Watchdog(writer, writing, spec) as watchdog:
            machine = _machine(spec)
            writer.start(machine)
            if spec.control == AS_IS:
                device = torch.device(machine.device)
                readings = read_beside(store, run_id, device, as_child=False)
            watchdog.start_clock()
            following = Following(
                writing.write_if_due,
                leaves_at_once,
                watchdog.cancelled.is_set,
                files.notes if files is not None else tuple,
            )
            ranks = Ranks(store, run_id, spec, machine.policy)
            result = run_script(spec, machine.policy, following, ranks)
            observations = of_first_rank(store, run_id, result.observations) or result.observations
            writing.write(observations, result.measured, last=True)
            state, message = ending(outcome_of(observations), spec, result.processes)
            details = result.traceback
            message = f"{message} {readings.stop()}".strip()
            end_python()
    except (BadInput, StoreError) as error:
        state, message = State.FAILED, str(error)
    except BaseException as error:
        what = str(error) if isinstance(error, OwnFault) else f"{type(error).__name__}: {error}"
        state, message = State.FAILED, f"ampscope itself failed, not the script: {what}"
        details = traceback.format_exc()
    readings.stop()
    try:
        writer.finish(state, message, details)
    except AmpscopeError:
        return EXIT_FAILED
    return 0


def outcome_of(observations: Sequence[Observation]) -> Outcome:
    """The last of a run's observations."""
    last = observations[-1]
    assert isinstance(last, Outcome)
    return last


def _not_private(store: Path, run_id: str, error: Exception) -> int:
    writer = RunWriter(store, run_id)
    writer.adopt()
    writer.finish(State.FAILED, f"The run could not have files of its own: {error}.")
    return EXIT_FAILED


def hard_limit_s(spec: RunSpec) -> float:
    """After so long a run of ``spec`` is ended, whatever it does."""
    return spec.time_limit_s * HANG_FACTOR + HANG_GRACE_S


class _Watchdog(Watchdog):
    """Ends a script that hangs, and says after which limit and how many steps."""

    def __init__(self, writer: RunWriter, writing: ScriptWriting, spec: RunSpec) -> None:
        super().__init__(writer, hard_limit_s(spec))
        self._writing = writing
        self._spec = spec

    def _end(self, status: int, state: State, message: str) -> None:
        if state is State.FAILED:
            message = passed_limit(self._spec.time_limit_s, self._writing.attempts)
        super()._end(status, state, message)


def _machine(spec: RunSpec) -> Machine:
    device = choose_device("auto")
    policy = choose_policy("cuda" if spec.policy == "cuda" else "native", device)
    return dataclasses.replace(describe(spec, device), policy=policy)


def settle(out: Path, err: Path) -> None:
    """Make this fork a process of the script's: a group of its own, so that what it starts can be
    ended with it; its output into files; no input; first to go when memory runs out."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python has it at its start
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for descriptor, path in ((1, out), (2, err)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, descriptor)
        os.close(target)
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text(_LIKELIEST_VICTIM)
