"""Run a user's script as ``__main__``, untouched, under a control, and record what happened.

The script keeps its arguments, its working directory and its way of importing the files beside it;
its own exception goes to its own ``sys.excepthook``. What it forks runs on unwatched.

:func:`run_child` is the child process, from the queued run to the recorded outcome;
:func:`run_script` is the one run of a script inside it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ampscope import extensions
from ampscope.capture.script.dtype_ledger import shifted_seeds
from ampscope.capture.script.op_uses import fixed_sentence
from ampscope.capture.script.run_digests import LineDigests
from ampscope.capture.script.script_histograms import ScriptMeasurements
from ampscope.control import BASELINE, TAPS, Control
from ampscope.errors import AmpscopeError, BadInput, StoreError
from ampscope.observations import COMPILED_NOTE, Observation, Outcome
from ampscope.patches import Patches
from ampscope.policy.device_profiles import PROFILES, USUAL, SimulatedDevice
from ampscope.records import (
    AUTO,
    HALF_FROM,
    JUDGED_RANK,
    LIGHT,
    OP_STEP,
    RUN_OUT_S,
    SEED_SHIFT,
    Machine,
    RunSpec,
    State,
)
from ampscope.runner import script_ending
from ampscope.runner.child_frame import Watchdog
from ampscope.runner.compiled_recorder import CompiledRecorder
from ampscope.runner.controls import applied
from ampscope.runner.device import (
    has_cuda,
    limit_memory,
    machine_of_script,
    read_too,
    sample_telemetry,
)
from ampscope.runner.private_files import adopted
from ampscope.runner.probe import arithmetic
from ampscope.runner.run_server import die_with_parent
from ampscope.runner.script_device import CudaRequests
from ampscope.runner.script_ending import (
    Enough,
    end_python,
    end_python_within,
    hard_limit_s,
    limit_reached,
    raised,
)
from ampscope.runner.script_main import Stage, stage, without_compiling
from ampscope.runner.script_ranks import (
    Processes,
    Ranks,
    machine_of_rank,
    of_one_rank,
    steps_of_ranks,
)
from ampscope.runner.script_recorder import ScriptRecorder, ScriptWriting
from ampscope.runner.script_text import SEED, execute, folder_of, names_half
from ampscope.script_ends import ending, passed_limit, with_hint
from ampscope.source_lines import SourceLines, line_name, name_files_from
from ampscope.store.writer import RunWriter
from ampscope.telemetry.sampler_process import Readings

EXIT_FAILED = 2
# Seconds without a step after which the wait is told, and by which factor it grows until it is told
# again: 10 s, 20 s, 40 s.
FIRST_TOLD_S, TOLD_AGAIN = 10.0, 2.0
_LIKELIEST_VICTIM = "1000"  # oom_score_adj(5): the kernel ends this process before any other
LIGHT_NOTE = (
    "Single ops were recorded in the first step alone, and in that in which half precision begins: "
    "every number of the unchanged run was finite, and losses and results are compared."
)
CLEANED_UP_S = 3.0  # for what a script registered with ``atexit``, where it is run again
UNLIMITED = (
    "The memory limit was not applied: on a machine with GPUs it bounds their memory, and this "
    "script stayed on the CPU."
)
# How long half precision is waited for: so many times ``spec.steps`` at most, and so many seconds
# after those steps. Ops are looked at in one of so many steps then.
MOST_WAITED, MOST_WAITED_S, GLANCE = 10, 24.0, 8
# A script whose steps were looked at may be about to end, and report what it has reached: it goes
# on for half as long again, within these seconds, without the costly instruments.
RUN_OUT_SHARE, LEAST_RUN_OUT_S, MOST_RUN_OUT_S = 0.5, 3.0, 20.0


def run_child(store: Path, run_id: str, spec: RunSpec, private: Path | None = None) -> int:
    """Run the script of a queued run and write what happened. Returns an exit status.

    ``private``: folder for the script's own view of its files; None lets it write for real.
    """
    run = adopted(store, run_id, spec, private)
    if run is None:
        return EXIT_FAILED
    writer, store, spec = run.writer, run.store, run.spec
    writing = ScriptWriting(writer)
    readings = Readings()
    machine: Machine  # until the script has shown where it is, what is known before

    def located(device: torch.device) -> bool:
        """Whether the run has just shown that it is on another device than was known."""
        nonlocal machine
        if not has_gpu or str(device) == machine.device:
            return False
        machine = machine_of_script(spec, device)
        writer.wait_for(machine)
        return True

    def stepped(recorder: ScriptRecorder) -> None:
        if located(recorder.device) and spec.control == BASELINE:
            read_too(readings, recorder.device)
        writing.write_if_due(recorder)

    def written(result: ScriptResult) -> tuple[State, str]:
        judged = dict(spec.settings).get(JUDGED_RANK)
        wanted = None if judged is None else int(judged)
        taken = of_one_rank(store, run_id, result.observations, wanted)
        observations = taken or result.observations
        if taken and not result.outcome.steps:
            writer.wait_for(machine_of_rank(store, run_id, outcome_of(taken).rank) or machine)
        elif result.outcome.steps or not result.processes:
            located(result.device)
        writing.write(observations, result.measured, last=True)
        return ending(outcome_of(observations), spec, result.processes, has_cuda=has_gpu)

    def leaves_at_once(result: ScriptResult) -> None:
        how = written(result)
        readings.stop()
        if result.outcome.ended != "killed":  # the watchdog has said why it ends the process
            writer.finish(*how)

    state, message, details = State.FINISHED, "", ""
    try:
        machine = machine_of_script(spec)
        has_gpu = machine.policy == "cuda"
        limit_memory(spec.memory_limit_mib, "cuda" if has_gpu else "cpu")
        with _Watchdog(store, writer, writing, spec) as watchdog:
            writer.start(machine)
            if spec.control == BASELINE:
                device = torch.device(machine.device)
                readings = sample_telemetry(store, run_id, device, as_child=False)
            watchdog.start_clock()
            cancelled = watchdog.cancelled.is_set
            following = RunCallbacks(stepped, leaves_at_once, cancelled, run.notes)
            ranks = Ranks(store, run_id, spec, machine.policy, run_action)
            result = run_script(spec, machine.policy, following, ranks)
            (state, message), details = written(result), result.traceback
            message = f"{message} {readings.stop()}".strip()
            end_python()
    except (BadInput, StoreError) as error:
        state, message = State.FAILED, str(error)
    except BaseException as error:
        is_known = isinstance(error, InternalError)
        what = str(error) if is_known else f"{type(error).__name__}: {error}"
        state, message = State.FAILED, f"ampscope itself failed, not the script: {what}"
        details = traceback.format_exc()
    readings.stop()
    try:
        writer.finish(state, message, details)
    except AmpscopeError:
        return EXIT_FAILED
    return 0


def only_steps_note(steps: int) -> str:
    """That a script was let to its end after so many steps."""
    return (
        f"The script came to its end. Behind optimizer step {steps:,} its losses, gradients and "
        "results were recorded, and no single ops."
    )


def outcome_of(observations: Sequence[Observation]) -> Outcome:
    """The last of a run's observations."""
    last = observations[-1]
    assert isinstance(last, Outcome)
    return last


class _Watchdog(Watchdog):
    """Ends a script that hangs, and says after which limit and how many steps. While the first step
    is not there, it says how long it is waited for, and where the script is."""

    def __init__(
        self, store: Path, writer: RunWriter, writing: ScriptWriting, spec: RunSpec
    ) -> None:
        super().__init__(writer, hard_limit_s(spec))
        self._store = store
        self._writing = writing
        self._spec = spec
        self._lines = SourceLines(folder_of(spec.workload))
        self._told_s = 0.0  # when it was last said that a first step is waited for

    def _tell(self, elapsed_s: float) -> None:
        has_step = self._writing.steps > 0
        if not has_step and elapsed_s < max(FIRST_TOLD_S, TOLD_AGAIN * self._told_s):
            return
        if not has_step and steps_of_ranks(self._store, self._writer.run_id) == 0:
            self._told_s = elapsed_s
            skip_to = self._spec.skip_to
            what = f"optimizer step {skip_to:,}" if skip_to else "the first optimizer step"
            told = f"waiting for {what}: {elapsed_s:.0f} s so far{_place(self._lines)}"
            self._writer.tell(told)
        elif self._told_s:
            self._told_s = 0.0
            self._writer.tell("")

    def _end(self, status: int, state: State, message: str) -> None:
        if state is State.FAILED:
            done = max(self._writing.steps, steps_of_ranks(self._store, self._writer.run_id))
            message = passed_limit(self._spec.time_limit_s, done)
            message = message if done else with_hint(message, self._spec, has_cuda=has_cuda())
        super()._end(status, state, message)


def _place(lines: SourceLines) -> str:
    """Where the main thread is in the user's own code; "" where it is in none, as a launcher's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not lines.is_user(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return ""
    name = frame.f_code.co_name
    inside = "" if name.startswith("<") else f"in {name} "
    return f", {inside}at {line_name((frame.f_code.co_filename, frame.f_lineno))}"


def settle(out: Path, err: Path, parent: int) -> None:
    """Make this fork of ``parent`` a process of the script's: a group of its own, so that what it
    starts can be ended with it; its output into files; no input; first to go when memory runs
    out. It ends with its parent, after which files are put back (Linux)."""
    os.setsid()
    die_with_parent(wanted=True)
    if os.getppid() != parent:
        os._exit(1)
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


class InternalError(Exception):
    """ampscope itself failed inside the script's run."""


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """What is left of a script's run."""

    observations: list[Observation]
    measured: ScriptMeasurements
    outcome: Outcome  # the last of the observations
    traceback: str
    processes: int  # that the script started
    device: torch.device  # where its parameters are


def _ignore(_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RunCallbacks:
    """Listener of a script's run."""

    on_optimizer_step: Callable[[ScriptRecorder], None] = _ignore
    on_exit: Callable[[ScriptResult], None] = _ignore  # before ``os._exit``
    is_cancelled: Callable[[], bool] = bool
    notes: Callable[[], tuple[str, ...]] = tuple  # on the run's files


def run_script(
    spec: RunSpec, policy: str, following: RunCallbacks, ranks: Ranks | None = None
) -> ScriptResult:
    """Run ``spec.workload`` (a file, or ``-m package.module``) under ``spec.control``; ``ranks``
    follow the processes that it starts."""
    return _Run(spec, policy, following, ranks).run()


def run_action(
    spec: RunSpec,
    policy: str,
    stepped: Callable[[ScriptRecorder], None],
    ended: Callable[[ScriptResult], None],
    action: Callable[[], Any],
    ranks: Ranks | None = None,
) -> Any:
    """Call ``action``, which a script of ``spec`` does in a process of its own, under its control;
    ``ranks`` follow the processes that it starts. ``stepped`` is called after each optimizer step,
    ``ended`` with what was recorded.

    Returns and raises what it does; at a limit of the run the process ends with status 0.
    """
    return _Run(spec, policy, RunCallbacks(stepped, ended), ranks).act(action)


class _Run:
    """One run of one script."""

    def __init__(
        self, spec: RunSpec, policy: str, following: RunCallbacks, ranks: Ranks | None
    ) -> None:
        self.spec = spec
        self.ranks = ranks
        self.policy = policy
        self.following = following
        self.folder = folder_of(spec.workload)
        name_files_from(self.folder)
        self.compiles = Control(spec.control).is_compiled
        recorder = CompiledRecorder if self.compiles else ScriptRecorder
        self.wanted = wanted = dict(spec.settings)
        op_step = int(wanted[OP_STEP]) if OP_STEP in wanted else None
        self.seed_shift = int(wanted.get(SEED_SHIFT, 0))
        skip_to = 0 if self.compiles else spec.skip_to
        self.recorder = recorder(self.folder, spec.cadence, self._step, skip_to, op_step)
        if isinstance(self.recorder, CompiledRecorder):
            self.recorder.has_taps = TAPS in Control(spec.control).names
        if spec.control in (BASELINE, "fp32") and op_step is None:
            self.recorder.line_digests = LineDigests(self.recorder.watch.place)
        self.recorder.is_light = LIGHT in wanted
        self.processes = Processes(self.recorder.switch_off)
        self.cuda = CudaRequests(
            self.recorder.lines,
            policy == "rehearsal",
            self.recorder.requests,
            stands_in=not self.compiles,
            on_missing=self._rehearsed_instead,
        )
        self.device: SimulatedDevice | None = None
        self.started = time.monotonic()
        self.stage = Stage()
        self.missing: list[set[str]] = []  # places that are to be in fp32 and were not met yet
        # Until then half precision is waited for; None: the steps are not yet over.
        self.waits_until: float | None = None
        self.stopped = ""  # why it was stopped, once it was
        self.is_script = False  # and no function of its, in a process of its own
        # What was recorded when the steps had been made, while the script goes on to its end.
        self.looked_at: list[Observation] = []
        self.is_over = False  # it has ended, and what was recorded is being put together
        self._leave: Callable[[], None] = functools.partial(os._exit, 0)

    def run(self) -> ScriptResult:
        self.is_script = True
        with self._everything():
            try:
                execute(self.spec.workload)
            except SystemExit as leaving:
                if isinstance(leaving, Enough):
                    return self._end(self._result("returned"))
                return self._end(self._left(leaving))
            except BaseException as error:
                return self._end(self._failed(error))
            return self._end(self._result("returned"))

    def act(self, action: Callable[[], Any]) -> Any:
        """Run a child script's ``action`` under the instruments; returns what it returns."""
        with self._everything(staged=False):
            try:
                returned = action()
            except SystemExit as leaving:
                if isinstance(leaving, Enough):
                    self.following.on_exit(self._result("returned"))
                    sys.exit(0)
                error = script_ending.spawned_error(leaving)
                failed = self._left(leaving) if error is None else self._failed(error, tell=False)
                self.following.on_exit(failed)
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
            stack.enter_context(shifted_seeds(self.seed_shift, SEED))
            stack.enter_context(self.processes.watching())
            if self.ranks is not None:
                stack.enter_context(self.ranks.watching())
            stack.enter_context(self.cuda.watching())
            simulated = extensions.simulated_device()
            if simulated and self.policy == "rehearsal" and not self.compiles:
                profile = PROFILES[self.spec.rehearsed or USUAL]
                self.device = stack.enter_context(extensions.load(simulated)(profile))
            self.missing = stack.enter_context(applied(self.spec.control, self.folder))
            # Nothing is compiled below a mode that stands in for CUDA's arithmetic.
            policy = "native" if self.compiles else self.policy
            stack.enter_context(arithmetic(policy, self.device))
            self.recorder.requests.finds_cuda = self.device is not None
            stack.enter_context(self.recorder.watching())
            yield

    @contextlib.contextmanager
    def _watched_exit(self) -> Iterator[None]:
        """``os._exit`` ends the process at once, so what was recorded is handed over before."""

        def exit_now(original: Callable[[int], None], code: int) -> None:
            watchdog = threading.current_thread().name == "ampscope-watchdog"
            if self.processes.is_own:
                with contextlib.suppress(Exception):  # it must end, whatever happens here
                    self.following.on_exit(
                        self._result("killed" if watchdog else "exit", exit_code=code)
                    )
            original(code)

        self._leave = functools.partial(exit_now, os._exit, 0)  # whatever the script puts there
        with Patches() as patches:
            patches.wrap(os, "_exit", exit_now)
            yield

    def _step(self, count: int) -> None:
        """An optimizer step ended, taken or skipped."""
        if not self.processes.is_own:
            return
        if self.looked_at:
            if self.following.is_cancelled():
                self.stopped = "cancelled"
                raise Enough
            return
        skip = self.recorder.skip
        elapsed_s = time.monotonic() - self.started
        if skip.is_waiting:  # the time limit is one of the wait, and then one of what is recorded
            count = 0
        else:
            self.following.on_optimizer_step(self.recorder)
            count, elapsed_s = count - skip.passed, elapsed_s - skip.elapsed_s
            if count == 1 and self._is_other_training():
                self._rehearsed_instead()
            if self.recorder.is_light:
                self._look_at_some(self.recorder.steps.count)
        is_done = 0 < int(self.wanted.get(LIGHT, 0)) <= count
        if count >= self.spec.steps and elapsed_s >= self.spec.grace_s and self._goes_on(count):
            count = 0  # only a time limit or cancelling may end it
        why = limit_reached(self.spec, count, elapsed_s, self.following.is_cancelled)
        if is_done:
            why = why or "steps"
        elif why == "steps" and self._runs_out(elapsed_s):
            return
        self.stopped = why
        if self.stopped:
            raise Enough

    def _look_at_some(self, done: int) -> None:
        """Of a control of which losses and results are asked, the ops are seen in the first step
        and in that in which half precision begins: what its lines compute there is compared."""
        begins = int(self.wanted.get(HALF_FROM, 0))
        if done == begins:
            self.recorder.look_again()
        elif done in (self.recorder.skip.recorded_from + 1, begins + 1):
            self.recorder.lighten()

    def _runs_out(self, elapsed_s: float) -> bool:
        """Whether the script, whose steps have been made, is now let to its own end."""
        spec, others = self.spec, self.ranks is not None and self.ranks.started
        is_judged = not (self.compiles or others or self.recorder.digests is not None)
        left_s = spec.time_limit_s - elapsed_s
        usual_s = min(MOST_RUN_OUT_S, max(LEAST_RUN_OUT_S, RUN_OUT_SHARE * elapsed_s))
        asked_s = float(self.wanted.get(RUN_OUT_S, usual_s))
        wanted_s = min(max(asked_s, usual_s) if asked_s else 0.0, left_s)
        if not (spec.grace_s and self.is_script and is_judged):
            return False
        if wanted_s < LEAST_RUN_OUT_S:
            return False
        self.looked_at = self.recorder.only_steps(self.recorder.outcome("steps"))
        waiting = threading.Timer(wanted_s, self._stop_run_out)
        waiting.daemon = True
        waiting.start()
        return True

    def _stop_run_out(self) -> None:
        """In a thread of its own, as the script may make no step any more: end the process with
        what was recorded when its steps had been made."""
        if self.stopped or self.is_over:
            return
        self.stopped = "steps"
        end_python_within(CLEANED_UP_S, self._leave, joins_threads=False)
        self._leave()

    def _goes_on(self, count: int) -> bool:
        """Whether steps that are to be looked at are still to come, because half precision took
        part late or may yet. The user's own number of steps is one from the first step on."""
        recorder, spec = self.recorder, self.spec
        if not spec.grace_s or self.compiles or recorder.digests is not None:
            return False
        first = recorder.window.first
        if first is None and HALF_FROM in self.wanted:
            first = int(self.wanted[HALF_FROM])
            if recorder.steps.count >= first:
                recorder.window.begin_at(first)
        if first is not None:
            return not recorder.window.is_over(recorder.steps.count, spec.steps, spec.grace_s)
        now = time.monotonic()
        if self.waits_until is None:
            may_come = names_half(recorder.lines.is_user)
            self.waits_until = now + MOST_WAITED_S if may_come else now
        recorder.watch.rest(until_half=bool(count % GLANCE))
        return count < MOST_WAITED * spec.steps and now < self.waits_until

    def _is_other_training(self) -> bool:
        """Whether the first step shows that the script takes what the device has, and lacks it."""
        used = self.recorder.precision
        in_fp32 = bool(used.flops()[0]) and not used.ran_half
        return self.cuda.follows_device or (in_fp32 and self.cuda.is_awaited)

    def _rehearsed_instead(self) -> None:
        """Under an open policy, end the process now: the script wants CUDA, and is run again on a
        simulated device. Not by an exception, which it may catch. Controls and processes among
        others, which wait for them, run on."""
        among_others = self.ranks is None or self.ranks.started
        is_open = self.spec.policy == AUTO and self.spec.control == BASELINE
        is_open = is_open and bool(extensions.simulated_device())
        if self.stopped or not is_open or not self.processes.is_own or among_others:
            return
        self.stopped = "steps"
        self.cuda.ends_the_run()
        self.recorder.switch_off()
        # Temporary folders and the like are cleaned up. Threads may wait for what never comes.
        end_python_within(CLEANED_UP_S, self._leave, joins_threads=False)
        self._leave()

    def _left(self, leaving: SystemExit) -> ScriptResult:
        """The script called ``sys.exit``, perhaps while it handled an error."""
        self.recorder.switch_off()
        handled = script_ending.left_because_of(leaving, self.recorder.lines)
        facts = {} if handled is None else handled.facts
        if "error_type" in self.recorder.errors.caught():
            facts = {}  # one that came often is told first
        elif facts:
            facts["error_step"] = self.recorder.steps.count
        text = "" if handled is None else handled.text
        return self._result("exit", text, exit_code=script_ending.exit_code(leaving), **facts)

    def _failed(self, error: BaseException, *, tell: bool = True) -> ScriptResult:
        self.recorder.switch_off()  # formatting the error runs the script's own code
        if where := script_ending.own_fault(error, self.recorder.lines):
            raise InternalError(f"{type(error).__name__} at {where}: {error}") from error
        module = self.recorder.errors.module_of(error)
        found = raised(error, self.recorder.lines)
        result = self._result(
            "exception",
            found.text,
            error_in_function=found.function,
            error_module=module,
            **found.facts,
        )
        if tell:
            script_ending.report(found.error)
        return result

    def _result(self, ended: str, text: str = "", **facts: Any) -> ScriptResult:
        self.recorder.switch_off()
        self.is_over = True
        compiled = COMPILED_NOTE if self.stage.compiles and not self.compiles else ""
        never = ", ".join(sorted(set().union(*self.missing)))
        unmet = f"Nothing ran at {never}: what was asked for there was not done." if never else ""
        fixed = fixed_sentence(self.recorder.watch.uses.records())
        asked = self.cuda.note(ran_half=self.recorder.precision.ran_half)
        if self.device is not None and self.device.was_used:
            device = PROFILES[self.spec.rehearsed or USUAL].name
            asked = f"A CUDA device ({device}) was rehearsed on the CPU. {asked}".rstrip()
            if self.device.rounded:
                names = ", ".join(self.device.rounded)
                asked += f" A CPU has no half kernel of {names}: computed in fp32, and rounded."
        recorder = self.recorder
        failures = [recorder.failures, recorder.steps.failures]
        failures += recorder.watch.failures, recorder.histograms.failures, recorder.ledger.failures
        failures.append(recorder.sites.failures)
        failures += [] if recorder.digests is None else [recorder.digests.failures]
        failures += [] if recorder.line_digests is None else [recorder.line_digests.failures]
        failed = [one.note for one in failures] + [recorder.histograms.note]
        watch = recorder.watch
        light = LIGHT_NOTE if recorder.is_light else ""
        unseen = recorder.skip.note, recorder.window.note, watch.sleep_note, watch.graph_note, light
        if self.spec.memory_limit_mib and self.policy == "cuda" and recorder.device.type == "cpu":
            failed.append(UNLIMITED)
        notes = tuple(note for note in (*unseen, asked, compiled, unmet, fixed, *failed) if note)
        notes += self.following.notes()
        if self.looked_at and self.stopped == "steps":
            *before, seen = self.looked_at
            outcome = replace(outcome_of([seen]), notes=notes)
            observations = [*before, outcome]
        else:
            if self.looked_at:
                notes += (only_steps_note(outcome_of(self.looked_at).steps),)
            outcome = self.recorder.outcome(self.stopped or ended, notes=notes, **facts)
            observations = self.recorder.observations(outcome)
        measured = self.recorder.histograms.take()
        started = self.processes.started
        return ScriptResult(observations, measured, outcome, text, started, recorder.device)

    def _end(self, result: ScriptResult) -> ScriptResult:
        """Only the script's own process goes on from here; a fork of it ends like any Python."""
        if not self.processes.is_own:
            end_python()
            os._exit(result.outcome.exit_code & 0xFF)
        return result
