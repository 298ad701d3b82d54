"""Runs of one script under controls: start the fork server, run a control, read back what was seen;
the same of a recorded script, as a process; and diagnoses as processes that outlive the one that
starts them (:class:`Job`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import click

from ampscope import extensions
from ampscope.analysis.precision_use import wants_cuda
from ampscope.analysis.printed_numbers import printed_numbers
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE
from ampscope.errors import AmpscopeError, BadInput, StoreError
from ampscope.files import TemporaryFolder, remove_leftovers_in, throw_away
from ampscope.hardware.describe import describe_machine, may_use_cuda, uses_cuda
from ampscope.launcher.children import (
    Followed,
    as_text,
    child_environment,
    close_if_open,
    end_of,
    ends_with_us,
    head,
    last_words,
    started,
    tail,
)
from ampscope.masks import hide_secrets_of
from ampscope.observations import Observation, Outcome
from ampscope.privacy import forget, is_masked, leave
from ampscope.pythons import TORCH, check_control, framework, python_for, with_package
from ampscope.records import AUTO, LIGHT, RUN_OUT_S, Cadence, RunInfo, RunSpec, State
from ampscope.runner.private_copy import claimed
from ampscope.runner.private_files import FORCED, LOCK, NO_OVERLAY
from ampscope.runner.put_back import PutBack, put_back, sentence
from ampscope.runner.script_ending import hard_limit_s
from ampscope.secret_names import is_secret
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter, new_run_id
from ampscope.story.document import visible

MAX_OUTPUT = 20_000
MAX_READ_OUTPUT = 4_000_000  # bytes whose numbers are read
NOTHING = Cadence(histogram=0, trace=0, shadow=0)
RUN_OUT = 3.0  # times what the baseline took to its end: so long a control may take to its own
LOOKED_EVERY_S = 2.0  # at what a run says of itself
ENDS_WITHIN_S = 120.0  # the fork server, that may still load torch
KILLED_AFTER_S = 5.0  # after the time at which the child's own watchdog ends it
EXIT_COULD_NOT_RUN = 2
DIAGNOSED = (0, 1)  # exit statuses of ``ampscope diagnose``: no fault, fault
MAX_WORDS = 4_000  # of the end of what a process said
_REPORTED = "Judged under"  # how the last paragraph of a printed diagnosis begins
_LAST_LINES = 20  # in which it stands; notes make it long


class ScriptRuns:
    """Serves runs of one script; use as a context manager."""

    def __init__(
        self,
        spec: RunSpec,
        store: Path,
        *,
        private: bool = False,
        in_place: bool = False,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """``private``: each run has a view of its own of the files that the script writes, and the
        user's stay as they are, unless ``in_place``; trackers send nothing. Otherwise the script
        writes for real, as the user's own training does. The runs are made by
        ``python``, with ``variables`` added to the environment, in ``folder``."""
        self.spec = spec
        self.private, self.in_place = private, in_place
        self.store = store
        self._python, self._variables, self._cwd = python, variables or {}, folder
        hide_secrets_of(spec.args)
        self.folder = TemporaryFolder()
        self._process: subprocess.Popen[bytes] | None = None
        self._open: set[str] = set()  # started, and not waited for to the end
        self._started: list[str] = []
        self._done: dict[str, str] = {}  # run -> the fork server's answer
        self._gone = False  # the fork server has ended
        self._changed = threading.Condition()
        self._put_back: list[PutBack] = []
        self._told = ""
        self._run_out: tuple[tuple[str, str], ...] = ()  # setting of the runs behind the baseline
        self.compared: list[str] = []  # folders whose files are compared and put back

    def __enter__(self) -> ScriptRuns:
        command = _server(self.spec, self._python)
        environment = {**child_environment(), **self._variables}
        if self.private:
            environment = trackers_offline(environment)
        if self._python != sys.executable:
            environment = with_package(environment)
        try:
            with self._own_words().open("wb") as words:
                self._process = subprocess.Popen(
                    [*command, "--store", str(self.store.absolute())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=words,
                    env=ends_with_us(environment),
                    cwd=self._cwd,
                    start_new_session=True,
                )
        except OSError as error:
            raise AmpscopeError(f"Could not start Python: {error.strerror}.") from error
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def can_apply(self, control: str) -> bool:
        """Whether the script's framework has this control or intervention."""
        try:
            check_control(self.spec.framework, control)
        except BadInput:
            return False
        return True

    def share_a_gpu(self) -> bool:
        """Whether two runs at a time may use one GPU. That a script trains on the CPU although
        there is a GPU is not known before it has run."""
        machine = describe_machine()
        if self.spec.framework != TORCH:  # how that was built is not known
            return bool(machine.gpus)
        built = {"ROCm": machine.software.torch_hip, "XPU": machine.software.torch_xpu}
        others = any(built.get(found.backend) for found in machine.accelerators)
        return uses_cuda(machine) or may_use_cuda(machine) or others

    def __exit__(self, *error: object) -> None:
        told = self._told
        with _signals_held():
            self._end()
            if self.files_note() != told:  # no report says it any more
                click.echo(f"ampscope: {visible(self._told)}", err=True)

    def files_note(self) -> str:
        """Which of the user's files were changed and put back; "" when none were."""
        self._told = sentence(self._put_back)
        return self._told

    def _end(self) -> None:
        process = self._process
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # the fork server kills what still runs, and ends
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:  # it hangs, and the signals of a user wait
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._close_runs()
        self.folder.cleanup()

    def begin_again(self, spec: RunSpec) -> ScriptRuns:
        """End the runs that are under way, and go on with those of ``spec``, which is of the same
        script: what starts them has loaded its libraries."""
        with _signals_held():
            for run_id in self._open:
                self._tell(run_id)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._gone or self._open <= self._done.keys(), ENDS_WITHIN_S
                )
            self._close_runs()
            self._open.clear()
            (Path(self.folder.name) / LOCK).unlink(missing_ok=True)
        self.spec, self._run_out = spec, ()
        return self

    def _close_runs(self) -> None:
        """What is under way was cancelled; what runs have changed of the user's is put back."""
        for run_id in self._open:
            forget(run_id)
            with contextlib.suppress(StoreError, BadInput):  # it may not have come to be
                close_if_open(self.store, run_id, State.CANCELLED, "Cancelled.")
        for run_id in tuple(self._started):
            self._end_view(run_id)

    def start(
        self, control: str, parent: str = "", *, merged: bool = True, limit_s: float = math.inf,
        light: int | None = None,
    ) -> str:  # fmt: skip
        """Start a run under ``control``; returns its id at once.

        ``merged``: standard output and standard error of the script go the same way. ``limit_s``:
        seconds after which it is stopped, where that is less than the time limit of all runs.
        ``light``: its ops are not wanted (:data:`ampscope.records.LIGHT`).
        """
        spec = within(replace(self.spec, control=control, parent=parent), limit_s)
        if light is not None:
            spec = replace(spec, settings=(*spec.settings, (LIGHT, str(light))))
        if parent:  # a control is compared by its losses and ops; histograms are of the first run
            spec = replace(spec, cadence=NOTHING)
        if control != BASELINE:  # another of which may be compared as it is
            spec = replace(spec, settings=(*spec.settings, *self._run_out))
        run_id = new_run_id()
        self._open.add(run_id)  # first: a signal may end this function at any place
        RunWriter.create(self.store, spec, run_id).close()
        self.serve(run_id, spec, merged=merged)
        return run_id

    def serve(self, run_id: str, spec: RunSpec, *, merged: bool = True) -> None:
        """Start a run that is queued in the store already."""
        leave(run_id, spec)
        self._open.add(run_id)
        self._started.append(run_id)
        limit = hard_limit_s(spec) + KILLED_AFTER_S
        paths = self._file(run_id, "out"), self._file(run_id, "out" if merged else "err")
        view = self._file(run_id, "view") if self.private and not self.in_place else ""
        self._tell(f"{run_id}\t{paths[0]}\t{paths[1]}\t{limit}\t{view}")

    def _tell(self, line: str) -> None:
        """One line to the process that starts the runs."""
        process = self._process
        if process is None or process.stdin is None:
            raise AmpscopeError("ScriptRuns is a context manager: enter it first.")
        with contextlib.suppress(BrokenPipeError):  # it has ended; waiting for the run says so
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()

    def wait(
        self, run_id: str, show: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> ScriptRun:  # fmt: skip
        """Wait for a run; ``show`` gets the script's output as it comes, ``say`` what the run waits
        for while it has made no step."""
        followed = Followed(self._file(run_id, "out"), as_text(show)) if show else None
        return self._wait(run_id, [followed] if followed else [], say)

    def pass_through(self, run_id: str, out: BinaryIO, err: BinaryIO) -> ScriptRun:
        """Wait for a run that is not merged, and copy its output byte for byte."""

        def to(stream: BinaryIO) -> Callable[[bytes], None]:
            return lambda part: (stream.write(part), stream.flush())[1]

        pairs = (("out", out), ("err", err))
        return self._wait(run_id, [Followed(self._file(run_id, n), to(s)) for n, s in pairs])

    def run(
        self, control: str, parent: str = "", say: Callable[[str], None] | None = None
    ) -> ScriptRun:
        """Start and wait; ``say`` as of :meth:`wait`."""
        return self.wait(self.start(control, parent), say=say)

    def first_to_share(self) -> str:
        """Id of the run that was the first to change what runs share; "" when none did."""
        return tail(Path(self.folder.name) / LOCK, MAX_OUTPUT).partition("\n")[0]

    def leave_overlay(self) -> bool:
        """Make further runs in a copy of the script's files; False where that cannot be."""
        if not self.private or self.in_place or os.environ.get(FORCED):
            return False
        (Path(self.folder.name) / NO_OVERLAY).touch()
        return True

    def _wait(
        self, run_id: str, followed: list[Followed], say: Callable[[str], None] | None = None
    ) -> ScriptRun:
        told, look_at = "", time.monotonic() + LOOKED_EVERY_S
        while True:
            if not self.compared and (found := claimed(self._file(run_id, "view"))):
                self.compared = found
                if say is not None:
                    say(
                        "change nothing now in "
                        f"{', '.join(found)}: what differs there after each run is put back"
                    )
            if say is not None and time.monotonic() > look_at:
                look_at = time.monotonic() + LOOKED_EVERY_S
                with Reader(self.store) as reader:
                    info = reader.run(run_id)
                if info.state is State.RUNNING and info.message not in ("", told):
                    say(told := info.message)
            with self._changed:
                ended = run_id in self._done or self._gone
                if not ended:
                    self._changed.wait(0.1)
            for output in followed:
                output.drain()
            if ended:
                break
        said = tail(self._file(run_id, "out"), MAX_OUTPUT)
        last = said + tail(self._file(run_id, "err"), MAX_OUTPUT)
        sentence = last_words(self._answer(run_id), last)
        close_if_open(self.store, run_id, State.FAILED, sentence)
        self._keep_printed(run_id)
        self._open.discard(run_id)
        self._end_view(run_id)
        forget(run_id)
        with Reader(self.store) as reader:
            info = reader.run(run_id)
            observations = tuple(reader.observations(run_id))
        if info.spec.control == BASELINE:
            for outcome in (o for o in observations if isinstance(o, Outcome)):
                # A control may be much slower, and its results are compared with the baseline's.
                wait_s = 0.0 if outcome.ended == "steps" else RUN_OUT * outcome.elapsed_s
                self._run_out = ((RUN_OUT_S, f"{wait_s:.1f}"),)
        return ScriptRun(info, observations, said)

    def _keep_printed(self, run_id: str) -> None:
        """Record the numbers that the script printed, but what its words call a secret."""
        read = {self._file(run_id, name) for name in ("out", "err")}
        said = [head(path, MAX_READ_OUTPUT) for path in sorted(read) if path.exists()]
        is_whole = all(len(part) < MAX_READ_OUTPUT for part in said)
        text = "\n".join(part.decode(errors="replace") for part in said)
        found = [p for p in printed_numbers(text, ended=is_whole) if not is_secret(p.words)]
        if found:
            with contextlib.closing(RunWriter(self.store, run_id)) as writer:
                writer.add_observations(found, ahead=True)

    def _answer(self, run_id: str) -> str:
        """What became of a run's process."""
        if run_id in self._done:
            return self._done[run_id]
        said = [line for line in tail(self._own_words(), MAX_OUTPUT).splitlines() if line.strip()]
        return f"gone: {said[-1].strip()}" if said else "gone"

    def _listen(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        for line in process.stdout:
            run_id, _, status = line.decode().strip().partition("\t")
            with self._changed:
                self._done[run_id] = status
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _end_view(self, run_id: str) -> None:
        """Throw away what a run wrote; also where it was killed, the user's files are put back."""
        view = self._file(run_id, "view")
        aside = self.store.absolute().with_name(f"{self.store.name}.changed") / run_id
        with _signals_held():
            self._put_back.append(done := put_back(view, aside))
            if run_id in self._started:
                self._started.remove(run_id)  # what differs from now on is the user's own work
            if not done.keeps_view:
                throw_away(view)

    def _file(self, run_id: str, name: str) -> Path:
        return Path(self.folder.name) / f"{run_id}.{name}"

    def _own_words(self) -> Path:
        return Path(self.folder.name) / "fork_server.err"


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One finished run with everything that was recorded."""

    info: RunInfo
    observations: tuple[Observation, ...]
    output: str  # the end of what the script printed

    @property
    def lacks_device(self) -> bool:
        """Whether the script wants a CUDA device that is not there, and is to be given one."""
        info = self.info
        view = RunView(info.spec.control, info.id, self.observations)
        said = f"{self.output}\n{info.traceback}"
        is_open = info.spec.policy == AUTO and bool(extensions.simulated_device())
        return is_open and wants_cuda(view, said)


def _server(spec: RunSpec, python: str) -> list[str]:
    """The command of the process that starts the runs, with ``python`` where they train with torch.
    Raises BadInput without the framework."""
    if spec.framework == TORCH:
        return [*started("ampscope.runner.fork_server", python), "--script", spec.workload]
    python = python_for(spec.framework)
    return [*started(f"{framework(spec.framework).package}.server"), "--python", python]


# What makes an experiment tracker write files instead of talking to its server.
_OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "COMET_START_ONLINE": "0",
    "SWANLAB_MODE": "offline",
}
_SENDS_NOTHING = ("disabled", "dryrun", "debug", "local")
_MLFLOW = "MLFLOW_TRACKING_URI"
_TRACKIO_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")


def trackers_offline(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a script's experiment trackers send nothing: the runs of a diagnosis
    are not the user's training. What they write as files lies in a run's private view. A tracker
    that the environment switches off stays off."""
    own = {name: value for name, value in environment.items() if value.lower() in _SENDS_NOTHING}
    made = {**environment, **_OFFLINE, **{name: own[name] for name in _OFFLINE if name in own}}
    if re.match(r"databricks|(?!file:|sqlite:)[\w+]+://", made.get(_MLFLOW, "")):
        made[_MLFLOW] = "file:./mlruns"
    for name in _TRACKIO_REMOTE:  # an empty one asks the Hub whose Space it is
        made.pop(name, None)
    return made | {"TRACKIO_DIR": "./trackio"}


def within(spec: RunSpec, limit_s: float) -> RunSpec:
    """``spec`` with a time limit of ``limit_s`` seconds at most."""
    return replace(spec, time_limit_s=min(spec.time_limit_s, max(limit_s, 1.0)))


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """What asks this process to stop comes when the block has ended: half of a user's files put
    back would be none."""
    came: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(one) not in (signal.SIG_IGN, None):
                before[one] = signal.signal(one, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            os.kill(os.getpid(), came[0])


def jobs_folder(store: Path) -> Path:
    """Where runs of ``store`` that are jobs have what their machines share, a folder for each
    diagnosis."""
    return store.absolute().with_name(f"{store.name}.jobs")


def remove_left_jobs(store: Path) -> None:
    """Remove what diagnoses of ``store`` that were killed have left there."""
    folder = jobs_folder(store)
    remove_leftovers_in(folder)
    with contextlib.suppress(OSError):  # there is none, or another diagnosis has its own in it
        folder.rmdir()


@click.command()
@click.option("--store", type=click.Path(path_type=Path), required=True)
@click.option("--run", "run_id", required=True)
@click.argument("controls", nargs=-1, required=True)
def main(store: Path, run_id: str, controls: tuple[str, ...]) -> None:
    """Run the script of RUN_ID under each of CONTROLS, as runs of the same diagnosis."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # there are files to put back
    try:
        repeat(store, run_id, controls)
    except AmpscopeError as error:
        click.echo(f"ampscope: {error}", err=True)
        sys.exit(EXIT_COULD_NOT_RUN)


def repeat(store: Path, run_id: str, controls: tuple[str, ...]) -> None:
    """One run of a recorded script for each control, one after another, in its own diagnosis. What
    is run (file, arguments, limits, policy) is read from the store, so that the caller names a run
    and a control and nothing else."""
    with Reader(store) as reader:
        info = reader.run(run_id)
        group = reader.group(info.spec.group)
    spec = repeatable(info)
    first = next((r for r in group if r.spec.control == BASELINE), info)
    with ScriptRuns(replace(spec, control="", parent=""), store, private=True) as runs:
        for control in controls:
            runs.run(control, parent=first.id)


def repeatable(info: RunInfo) -> RunSpec:
    """The run's spec. Raises BadInput for a probe, for an imported run, and for a script that is no
    longer there."""
    spec = info.spec
    if spec.kind != "script":
        raise BadInput("This run is a probe, not a script.")
    if spec.imported:  # its file and arguments come from an untrusted file
        raise BadInput("This run was imported. Run its script yourself, with: ampscope diagnose")
    spec = replace(spec, settings=tuple(s for s in spec.settings if s[0] != LIGHT))
    if is_masked(spec.args):
        raise BadInput(
            "Secrets among its arguments are not stored, so it cannot be run from here. Run it "
            "yourself, with: ampscope diagnose"
        )
    if not is_module(spec) and not _is_file(spec.workload):
        raise BadInput(f"There is no file {spec.workload} any more.")
    return spec


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # no name of a file
        return False


def is_module(spec: RunSpec) -> bool:
    """Whether the script was started as ``-m package.module``."""
    return spec.workload.startswith("-m ")


def folder_of(spec: RunSpec) -> Path:
    """Where a script is run again: in its own folder; a module where this process is."""
    return Path.cwd() if is_module(spec) else Path(spec.workload).parent


@dataclass(frozen=True, slots=True)
class Job:
    """A diagnosis or a re-run in a process of its own, which outlives the one that starts it.

        job = start_diagnosis(Path("train.py"), store)      # returns at once
        is_running(job); detached_words(job); stop(job)

    What it finds goes to the store. Between the start of such a process and its first run in the
    store lie a second or two, in which only the process itself shows that something is under way.
    """

    pid: int


def start_diagnosis(
    script: Path,
    store: Path,
    *,
    policy: str = "native",
    steps: int = 0,
    time_limit_s: float = 0.0,
    args: Sequence[str] = (),
    python: str = sys.executable,
) -> Job:
    """``ampscope diagnose`` of one script with its ``args``, by ``python``. ``policy`` is auto,
    native or cuda; ``steps`` and ``time_limit_s`` (of each run) are its own default where 0."""
    command = ["ampscope.cli.main", "diagnose", "--quiet", "--store", str(store.absolute())]
    command += ["--policy", policy, *(["--steps", str(steps)] if steps else [])]
    command += ["--time-limit", str(time_limit_s)] if time_limit_s else []
    return _start([*command, str(script), *args], script.parent, python)


def start_captured(capsule: Path, trust: str, store: Path, python: str = sys.executable) -> Job:
    """``ampscope diagnose --capsule`` by ``python``, which imports ``trust``, FILE.py:FUNCTION."""
    command = ["ampscope.cli.main", "diagnose", "--quiet", "--store", str(store.absolute())]
    command += ["--capsule", str(capsule), "--trust", trust]
    return _start(command, Path(trust.rpartition(":")[0]).parent, python)


def start_controls(
    store: Path, run_id: str, controls: Sequence[str], python: str = sys.executable
) -> Job:
    """Run the script of ``run_id`` again under ``controls``, in the same group, by ``python``.

    Raises BadInput when ``run_id`` is no script's run or its file is gone.
    """
    with Reader(store) as reader:
        spec = repeatable(reader.run(run_id))
    command = ["ampscope.launcher.script_runs", "--store", str(store.absolute())]
    return _start([*command, "--run", run_id, "--", *controls], folder_of(spec), python)


# A reference keeps Popen from warning and lets an ended child be reaped. The file holds what it
# said; it has no name, so nothing is left behind.
_started: dict[int, subprocess.Popen[bytes]] = {}
_words: dict[int, int] = {}  # pid -> file descriptor


def _start(arguments: Sequence[str], folder: Path, python: str) -> Job:
    environment = child_environment()
    command = [*started(arguments[0]), *arguments[1:]]
    if python != sys.executable:  # with this ampscope, whose store it writes
        environment = with_package(environment)
        command = [python, *command[1:]]
    with tempfile.TemporaryFile() as words:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                cwd=folder,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise AmpscopeError(f"Could not start Python in {folder}: {error.strerror}.") from error
        _words[process.pid] = os.dup(words.fileno())
    _started[process.pid] = process
    return Job(process.pid)


def is_running(job: Job) -> bool:
    """Whether the process is still there."""
    process = _started.get(job.pid)
    return process is not None and process.poll() is None


def detached_words(job: Job) -> str:
    """Why it could not do its work: the last line that it said; "" when it did, or still runs."""
    process = _started.get(job.pid)
    if process is None or process.poll() is None or process.returncode in DIAGNOSED:
        return ""
    words = end_of(_words[job.pid], MAX_WORDS)
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if any(line.startswith(_REPORTED) for line in lines[-_LAST_LINES:]):
        return ""  # a report was printed: undetermined is a verdict too, and the page shows it
    said = lines[-1].removeprefix("ampscope: ") if lines else ""
    return said or f"It ended with status {process.returncode} and said nothing."


def stop(job: Job) -> None:
    """End it as Ctrl-C would; the script's runs die with the process that waits for them. Not by
    SIGINT itself, which is ignored below a server that a shell script started in the background."""
    if is_running(job):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
