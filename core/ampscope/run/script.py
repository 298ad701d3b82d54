"""Run a user's script as ``__main__``, untouched, under a control, and record what happened.

The script keeps its arguments, its working directory and its way of importing the files beside it;
its own exception goes to its own ``sys.excepthook``. What it forks runs on unwatched.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ampscope.capture.script.op_uses import fixed_sentence
from ampscope.capture.script.script_histograms import Measured
from ampscope.capture.script.source_lines import line_name, name_files_from
from ampscope.observations import COMPILED_NOTE, Observation, Outcome
from ampscope.records import RunSpec
from ampscope.run import script_errors
from ampscope.run.compiled_recorder import CompiledRecorder
from ampscope.run.controls import COMPILED, applied
from ampscope.run.probe import arithmetic
from ampscope.run.python_end import end_python
from ampscope.run.script_cuda import CudaRequests
from ampscope.run.script_main import Stage, stage, without_compiling
from ampscope.run.script_processes import Processes
from ampscope.run.script_ranks import Ranks
from ampscope.run.script_recorder import ScriptRecorder
from ampscope.run.script_text import execute, folder_of

MAX_ERROR_TEXT = 2_000


class _Enough(SystemExit):
    """Ends the script at a limit. ``except Exception`` lets it by, and a thread ends without a
    word, as it does on ``sys.exit``."""


class OwnFault(Exception):  # noqa: N818  # says whose it is
    """ampscope itself failed inside the script's run."""


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """What is left of a script's run."""

    observations: list[Observation]
    measured: Measured
    outcome: Outcome  # the last of the observations
    traceback: str
    processes: int  # that the script started


@dataclass(frozen=True, slots=True)
class Following:
    """Who is told while a script runs."""

    on_attempt: Callable[[ScriptRecorder], None] = lambda recorder: None
    on_exit: Callable[[ScriptResult], None] = lambda result: None  # before ``os._exit``
    is_cancelled: Callable[[], bool] = lambda: False
    notes: Callable[[], tuple[str, ...]] = tuple  # on the run's files


def run_script(
    spec: RunSpec, policy: str, following: Following, ranks: Ranks | None = None
) -> ScriptResult:
    """Run ``spec.workload`` (a file, or ``-m package.module``) under ``spec.control``; ``ranks``
    follow the processes that it starts."""
    return _Run(spec, policy, following, ranks).run()


def run_action(spec: RunSpec, policy: str, following: Following, action: Callable[[], Any]) -> Any:
    """Call ``action``, which a script of ``spec`` does in a process of its own, under its control.

    Returns and raises what it does; at a limit of the run the process ends with status 0.
    """
    return _Run(spec, policy, following, None).act(action)


class _Run:
    """One run of one script."""

    def __init__(
        self, spec: RunSpec, policy: str, following: Following, ranks: Ranks | None
    ) -> None:
        self.spec = spec
        self.ranks = ranks
        self.policy = policy
        self.following = following
        self.folder = folder_of(spec.workload)
        name_files_from(self.folder)
        self.compiles = spec.control == COMPILED
        recorder = CompiledRecorder if self.compiles else ScriptRecorder
        self.recorder = recorder(self.folder, spec.cadence, self._attempt)
        self.processes = Processes(self.recorder.switch_off)
        self.cuda = CudaRequests(self.recorder.lines, policy == "rehearsal", self.recorder.requests)
        started = time.monotonic()
        self.deadline = started + spec.time_limit_s
        self.grace = started + spec.grace_s
        self.stage = Stage()
        self.missing: list[set[str]] = []  # places that are to be in fp32 and were not met yet
        self.stopped = ""  # why it was stopped, once it was

    def run(self) -> ScriptResult:
        with self._everything():
            try:
                execute(self.spec.workload)
            except SystemExit as leaving:
                if isinstance(leaving, _Enough):
                    return self._end(self._result("returned"))
                code = script_errors.exit_code(leaving)
                return self._end(self._result("exit", exit_code=code))
            except BaseException as error:
                return self._end(self._failed(error))
            return self._end(self._result("returned"))

    def act(self, action: Callable[[], Any]) -> Any:
        """The same for what a child of the script's does."""
        with self._everything(staged=False):
            try:
                returned = action()
            except SystemExit as leaving:
                code = 0 if isinstance(leaving, _Enough) else script_errors.exit_code(leaving)
                ended = "returned" if isinstance(leaving, _Enough) else "exit"
                self.following.on_exit(self._result(ended, exit_code=code))
                if isinstance(leaving, _Enough):
                    sys.exit(0)
                raise
            except BaseException as error:
                self.following.on_exit(self._failed(error, tell=False))
                raise
            self.following.on_exit(self._result("returned"))
            return returned

    @contextlib.contextmanager
    def _everything(self, *, staged: bool = True) -> Iterator[None]:
        """The script's surroundings and all instruments; all taken back on exit."""
        with contextlib.ExitStack() as stack:
            if staged:
                workload, args = self.spec.workload, self.spec.args
                self.stage = stack.enter_context(stage(workload, args, compiles=self.compiles))
            elif not self.compiles:
                self.stage = stack.enter_context(without_compiling())
            stack.enter_context(self._watched_exit())
            stack.enter_context(self.processes.watching())
            if self.ranks is not None:
                stack.enter_context(self.ranks.watching())
            stack.enter_context(self.cuda.watching())
            self.missing = stack.enter_context(applied(self.spec.control, self.folder))
            # Nothing is compiled below a mode that stands in for CUDA's arithmetic.
            stack.enter_context(arithmetic("native" if self.compiles else self.policy))
            stack.enter_context(self.recorder.watching())
            yield

    @contextlib.contextmanager
    def _watched_exit(self) -> Iterator[None]:
        """``os._exit`` ends the process at once, so what was recorded is handed over before."""
        original = os._exit

        def exit_now(code: int) -> None:
            watchdog = threading.current_thread().name == "ampscope-watchdog"
            if self.processes.is_own:
                with contextlib.suppress(Exception):  # it must end, whatever happens here
                    self.following.on_exit(
                        self._result("killed" if watchdog else "exit", exit_code=code)
                    )
            original(code)

        os._exit = exit_now  # type: ignore[assignment]  # it returns no more than the original
        try:
            yield
        finally:
            os._exit = original

    def _attempt(self, count: int) -> None:
        """An optimizer step was attempted."""
        if not self.processes.is_own:
            return
        self.following.on_attempt(self.recorder)
        if count >= self.spec.steps and time.monotonic() >= self.grace:
            self.stopped = "steps"
        elif time.monotonic() > self.deadline:
            self.stopped = "time"
        elif self.following.is_cancelled():
            self.stopped = "cancelled"
        if self.stopped:
            raise _Enough

    def _failed(self, error: BaseException, *, tell: bool = True) -> ScriptResult:
        self.recorder.switch_off()  # formatting the error runs the script's own code
        if where := script_errors.own_fault(error, self.recorder.lines):
            raise OwnFault(f"{type(error).__name__} at {where}: {error}") from error
        module = self.recorder.errors.module_of(error)
        error = script_errors.clean(error, self.recorder.lines)
        place, function = script_errors.place_of(error, self.recorder.lines)
        text = script_errors.text_of(error)
        result = self._result(
            "exception",
            text,
            exit_code=1,
            error_type=type(error).__name__,
            error_text=str(error)[:MAX_ERROR_TEXT],
            error_line=line_name(place),
            error_in_function=function,
            error_module=module,
        )
        if tell:
            script_errors.report(error)
        return result

    def _result(self, ended: str, text: str = "", **facts: Any) -> ScriptResult:
        self.recorder.switch_off()
        compiled = COMPILED_NOTE if self.stage.compiles and not self.compiles else ""
        never = ", ".join(sorted(set().union(*self.missing)))
        unmet = f"Nothing ran at {never}: what was asked for there was not done." if never else ""
        fixed = fixed_sentence(self.recorder.watch.uses.records())
        asked = self.cuda.note(ran_half=self.recorder.precision.ran_half)
        failed = (self.recorder.watch.failures.note, self.recorder.histograms.failures.note)
        notes = tuple(note for note in (asked, compiled, unmet, fixed, *failed) if note)
        notes += self.following.notes()
        outcome = self.recorder.outcome(self.stopped or ended, notes=notes, **facts)
        observations = self.recorder.observations(outcome)
        measured = self.recorder.histograms.take()
        return ScriptResult(observations, measured, outcome, text, self.processes.started)

    def _end(self, result: ScriptResult) -> ScriptResult:
        """Only the script's own process goes on from here; a fork of it ends like any Python."""
        if not self.processes.is_own:
            end_python()
            os._exit(result.outcome.exit_code & 0xFF)
        return result
