"""The runs of a diagnosis as jobs of a cluster: ``ampscope diagnose --on slurm``, ``--on ray``.

The runs are independent, so an engine that a cluster has already starts them: Ray; or submitit, on
Slurm or, with ``--on local``, as processes of this machine. Each job serves one run, as a diagnosis
on one machine does, and writes a store of its own in a folder that both machines see; what it
recorded is merged into the user's store when it ends, as ``ampscope runs merge --trust`` does.

    with SubmittedRuns(spec, store, "slurm") as runs:
        first = runs.start("as_is")                 # both wait in the queue, or run
        second = runs.start("fp32", parent=first)
        runs.wait(first), runs.wait(second)

submitit hands jobs over as pickles, in that folder, which only its owner can read; Ray over its own
connections. ampscope itself reads back a store and the end of what the script printed.

Jobs of this machine (``--on local``) end with the command, also where that is killed. Jobs of a
cluster are the cluster's, and end by their time limit then.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ampscope.errors import AmpscopeError, BadInput
from ampscope.files import TemporaryFolder, throw_away
from ampscope.launcher.children import close_if_open
from ampscope.launcher.script_runs import (
    ENDS_WITHIN_S,
    NOTHING,
    ScriptRun,
    ScriptRuns,
    jobs_folder,
    within,
)
from ampscope.records import LIGHT, RunSpec, State
from ampscope.runner.script_ending import hard_limit_s
from ampscope.store import db
from ampscope.store.merging import merge
from ampscope.store.processes import is_alive, process_start_time
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

VARIABLE = "AMPSCOPE_SUBMIT"  # "partition=gpu,gpus_per_node=1": what the engine is told
OVER_S = 120  # a job's time beyond the run's own: its start, and the end of its processes
LOCAL = "local"
LOOKED_EVERY_S = 0.5  # at the command, by a job of this machine
STOP_S = ENDS_WITHIN_S + 60  # a job that was told to end and puts files back, until it is killed
_TERMINAL = (signal.SIGINT, signal.SIGHUP)  # what a terminal sends to all that was started from it


class SubmittedRuns(ScriptRuns):
    """As ScriptRuns; a run is a job. Raises BadInput where the engine is not there."""

    def __init__(self, spec: RunSpec, store: Path, engine: str) -> None:
        super().__init__(spec, store, private=True)
        self._engine = engine
        self._jobs: dict[str, Any] = {}
        self._folder: TemporaryFolder | None = None
        self._executor: Any = None

    def __enter__(self) -> SubmittedRuns:
        try:
            self._executor = self._ready()
        except BaseException:
            self._throw_away()
            self.folder.cleanup()
            raise
        return self

    def _ready(self) -> Any:
        """The engine's executor: what has ``submit(function, *arguments)``, which returns a job."""
        asked = _asked()
        if self._engine == "ray":
            executor = _Ray(_module("ray", "ray"), asked)
            self._make_shared()
            return executor
        submitit = _module("submitit", "slurm")
        if self._engine == "slurm" and shutil.which("sbatch") is None:
            raise BadInput("This machine has no sbatch: start ampscope where you submit jobs from.")
        shared = self._make_shared()
        executor = submitit.AutoExecutor(shared / "submitit", cluster=self._engine)
        minutes = -(-int(hard_limit_s(self.spec) + OVER_S) // 60)
        try:
            executor.update_parameters(timeout_min=minutes, name="ampscope", **asked)
        except Exception as error:  # submitit's own words for a parameter that there is not
            raise BadInput(f"submitit does not take {VARIABLE}: {error}") from error
        return executor

    def start(
        self, control: str, parent: str = "", *, merged: bool = True, limit_s: float = math.inf,
        light: int | None = None,
    ) -> str:  # fmt: skip
        """Submit a run under ``control``; returns its id at once. ``limit_s`` as for other runs:
        of its own seconds, however long it waits in a queue."""
        spec = within(replace(self.spec, control=control, parent=parent), limit_s)
        if light is not None:
            spec = replace(spec, settings=(*spec.settings, (LIGHT, str(light))))
        if parent:
            spec = replace(spec, cadence=NOTHING)
        number = len(self._jobs)
        store = self._shared / f"run{number}.db"
        db.open_for_writing(store, "DELETE").close()  # the folder may be another machine's
        writer = RunWriter.create(store, spec)
        writer.close()
        self._open.add(writer.run_id)
        run = (spec, str(store), writer.run_id, os.getcwd())
        if self._engine == LOCAL:
            me = os.getpid()
            # submitit's process beside a job would answer Ctrl-C with a traceback on our terminal.
            with _held_back(_TERMINAL):
                job = self._executor.submit(serve_here, (me, process_start_time(me)), *run)
                self._jobs[writer.run_id] = job
        else:
            self._jobs[writer.run_id] = self._executor.submit(serve, *run)
        return writer.run_id

    def wait(
        self, run_id: str, show: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> ScriptRun:  # fmt: skip
        """Wait for a job, and merge what it recorded. ``show`` gets the script's output then, and
        ``say`` nothing: a job is not seen before its end."""
        job = self._jobs[run_id]
        store = self._store_of(run_id)
        try:
            said = str(job.result())
        except Exception as error:  # the engine's own: a node that is gone, a job that was ended
            said = ""
            last = (str(error).strip().splitlines() or [""])[-1]
            words = f"{type(error).__name__}: {last}"[:300]
            close_if_open(store, run_id, State.FAILED, f"The job ended early ({words}).")
        if show and said:
            show(said)
        list(merge([store], self.store, trust=True))
        self._open.discard(run_id)
        with Reader(self.store) as reader:
            info = reader.run(run_id)
            observations = tuple(reader.observations(run_id))
        return ScriptRun(info, observations, said)

    def share_a_gpu(self) -> bool:
        """Only this machine's: an engine gives each job its own GPU."""
        return self._engine == LOCAL and super().share_a_gpu()

    def first_to_share(self) -> str:
        """Nothing: jobs do not see each other's locks (docs/rehearsal.md)."""
        return ""

    def leave_overlay(self) -> bool:
        """No: each job has views of its own."""
        return False

    def _end(self) -> None:
        submitted = [run_id for run_id in self._jobs if run_id in self._open]
        jobs = [self._jobs[run_id] for run_id in submitted]
        if self._engine == LOCAL:
            _end_here(jobs)
        else:
            for job in jobs:
                with contextlib.suppress(Exception):  # it may have ended
                    job.cancel()
        for run_id in submitted:
            with contextlib.suppress(AmpscopeError):
                store = self._store_of(run_id)
                close_if_open(store, run_id, State.CANCELLED, "Cancelled.")
                list(merge([store], self.store, trust=True))
        if isinstance(self._executor, _Ray):
            self._executor.close()
        self._throw_away()
        self.folder.cleanup()

    def _store_of(self, run_id: str) -> Path:
        return self._shared / f"run{list(self._jobs).index(run_id)}.db"

    @property
    def _shared(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name)

    def _make_shared(self) -> Path:
        place = jobs_folder(self.store)
        place.mkdir(parents=True, mode=0o700, exist_ok=True)
        try:
            self._folder = TemporaryFolder(place)
        except FileNotFoundError:  # another diagnosis has just ended and removed it
            place.mkdir(parents=True, mode=0o700, exist_ok=True)
            self._folder = TemporaryFolder(place)
        return self._shared

    def _throw_away(self) -> None:
        if self._folder is not None:
            throw_away(self._shared)  # also where a job that is being ended still writes
            with contextlib.suppress(OSError):
                self._folder.cleanup()
        with contextlib.suppress(OSError):  # another diagnosis's folder may be there
            jobs_folder(self.store).rmdir()


class _Ray:
    """Ray's tasks as jobs, on the cluster of ``RAY_ADDRESS``, else the one that was started on this
    machine, else one of this machine alone, which goes with the diagnosis. ``asked`` are options of
    a task, such as ``num_gpus``. Raises BadInput where Ray takes none of that."""

    def __init__(self, ray: Any, asked: dict[str, Any]) -> None:
        self._ray = ray
        try:
            # A task that did not end well has said so in its store: it is not run again.
            self._task = ray.remote(max_retries=0)(serve).options(**asked)
        except Exception as error:  # Ray's own words for an option that there is not
            raise BadInput(f"Ray does not take {VARIABLE}: {error}") from error
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                ray.init(log_to_driver=False, logging_level="ERROR")
            except Exception as error:  # no such address, a token that it does not take
                raise BadInput(f"No Ray cluster can be used: {error}") from error

    def submit(self, _: Callable[..., str], *arguments: Any) -> _RayJob:
        return _RayJob(self._ray, self._task.remote(*arguments))

    def close(self) -> None:
        if self._is_ours:
            self._ray.shutdown()


class _RayJob:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def result(self) -> Any:
        return self._ray.get(self._reference)

    def cancel(self) -> None:
        self._ray.cancel(self._reference, force=True)


def _module(name: str, extra: str) -> Any:
    """A library that ampscope does without otherwise."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(
            f"--on needs {name}, which is not installed: pip install 'ampscope[{extra}]'."
        ) from error


def serve(spec: RunSpec, store: str, run_id: str, folder: str) -> str:
    """The job: one queued run, on whichever machine. Returns the end of the script's output."""
    os.chdir(folder)
    path = Path(store)
    with ScriptRuns(spec, path, private=True) as runs:
        runs.serve(run_id, spec)
        return runs.wait(run_id).output


def serve_here(command: tuple[int, float | None], *run: Any) -> str:
    """:func:`serve` on the machine of the command, a process and its start, which it ends with."""
    for number in _TERMINAL:
        signal.signal(number, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINAL)
    if not is_alive(*command):
        os._exit(1)
    threading.Thread(target=_end_with, args=command, daemon=True).start()
    return serve(*run)


def _end_with(pid: int, started: float | None) -> None:
    """End this process when that one is gone: first so that it can end its run and clean up."""
    while is_alive(pid, started):
        time.sleep(LOOKED_EVERY_S)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(STOP_S)
    os._exit(1)


def _end_here(jobs: list[Any]) -> None:
    """End jobs of this machine: each is a process of submitit's, and below it the one that serves
    the run, which ends it and cleans up when it is told to."""
    trees: list[tuple[psutil.Process, list[psutil.Process]]] = []
    for job in jobs:
        with contextlib.suppress(psutil.Error):  # it has ended
            above = psutil.Process(int(job.job_id))
            trees.append((above, above.children()))
    for _, serving in trees:
        for process in serving:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGINT)
    psutil.wait_procs([above for above, _ in trees], STOP_S)
    for above, serving in trees:
        for process in (above, *serving):  # first what would start another
            with contextlib.suppress(psutil.Error):
                process.kill()
    psutil.wait_procs([above for above, _ in trees], STOP_S)


@contextlib.contextmanager
def _held_back(numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Signals that come meanwhile are answered afterwards; a process that is started never gets
    them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _asked() -> dict[str, Any]:
    """What :data:`VARIABLE` asks of the executor."""
    given = [part for part in os.environ.get(VARIABLE, "").split(",") if part.strip()]
    pairs = [part.partition("=") for part in given]
    if any(not equals for _, equals, _ in pairs):
        raise BadInput(f"{VARIABLE} is a list such as partition=gpu,gpus_per_node=1.")
    return {k.strip(): int(v) if v.strip().isdigit() else v.strip() for k, _, v in pairs}
