"""The diagnoses that the store holds, and those that were started from this dashboard.

Runs that were started together share a group; what was concluded of it is read once, until a run is
added or ends. Of this dashboard's own jobs one runs at a time: a diagnosis makes several runs, two
of them at once, and a second one beside it would only slow both. Jobs are kept by the script's
name, for all browsers alike, because they share one machine.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE
from ampscope.diagnosis.load import counting, load_diagnosis
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.errors import AmpscopeError, BadInput
from ampscope.launcher import script_runs
from ampscope.launcher.script_runs import Job
from ampscope.observations import Observation
from ampscope.records import RunInfo, State
from ampscope.store.reader import Reader
from app import options, permissions, run_rows, states, store
from app.runs import actions
from app.states import BadgeColor

RUNS_READ = 4_000  # a zoo of 72 scripts has about 400 runs
BETWEEN_RUNS_S = 5.0  # a diagnosis thinks for less than a second between two runs
CANCEL_S = 10.0  # a run sees the request within 1 s and has 5 s to reach the end of its step
_jobs: dict[str, Job] = {}
_stopping: set[str] = set()
OWN_PYTHON = ""  # the name of the Python that runs the dashboard
_python_of: dict[str, str] = {}  # script -> name of the Python that it was last started with


@dataclasses.dataclass(frozen=True, slots=True)
class DiagnosisCase:
    """One diagnosed script: its runs, and what is known of it so far."""

    head: RunInfo  # the baseline run; of a group without one, its first
    runs: tuple[RunInfo, ...]  # oldest first
    report: DiagnosisResult | None  # None while the baseline run has not ended
    is_moving: bool  # a run is under way, or the next one is about to start

    @property
    def script(self) -> str:
        """The script's path, or ``-m package.module``."""
        return self.head.spec.workload

    @property
    def verdict(self) -> tuple[str, BadgeColor]:
        """In a word or two, with a badge's colour."""
        report = self.report
        if report is None:
            return "running", states.BADGE_COLORS[State.RUNNING]
        if report.could_not_run:
            return "could not run", "orange"
        if report.diagnosis.findings:
            return "fault", "red"
        if report.undecided:
            return "undetermined", "orange"
        return ("latent", "orange") if report.diagnosis.latent else ("no fault", "green")

    def run_of(self, control: str) -> RunInfo | None:
        """The run that counts for ``control``."""
        return next((r for r in reversed(counting(self.runs)) if r.spec.control == control), None)


def recorded_runs() -> list[RunInfo]:
    """All runs of scripts, newest first."""
    return [run for run in store.runs(RUNS_READ) if run.spec.kind == "script"]


def group_heads(runs: Sequence[RunInfo]) -> list[RunInfo]:
    """One run for each group, newest first."""
    found: dict[str, RunInfo] = {}
    for run in runs:
        key = run.spec.group or run.id
        kept = found.get(key)
        # Newest first: the newest baseline run stands for its group, else the group's oldest run.
        if kept is None or kept.spec.control != BASELINE:
            found[key] = run
    return list(found.values())


def head_of(run: RunInfo, heads: Sequence[RunInfo]) -> RunInfo | None:
    """The one of ``heads`` that stands for the run's group."""
    group = run.spec.group
    return next((h for h in heads if h.id == run.id or (group and h.spec.group == group)), None)


def case_of(run: RunInfo) -> DiagnosisCase | None:
    """The diagnosis that a run of a script belongs to."""
    runs = recorded_runs()
    head = head_of(run, group_heads(runs))
    return None if head is None else read_case(head, runs)


def read_case(head: RunInfo, runs: Sequence[RunInfo]) -> DiagnosisCase:
    """The case that ``head`` stands for, with the verdict as far as there is one."""
    group = head.spec.group
    own = tuple(r for r in reversed(runs) if group and r.spec.group == group) or (head,)
    return DiagnosisCase(head, own, _report(head, own), _is_moving(head, own))


def _report(head: RunInfo, runs: Sequence[RunInfo]) -> DiagnosisResult | None:
    try:
        return store.as_visible(_recalled(str(store.path()), head.id, _version(head, runs)))
    except BadInput:  # the baseline run still runs
        return None


@st.cache_data(show_spinner=False, max_entries=400)
def _recalled(path: str, run_id: str, version: str) -> DiagnosisResult:
    """``version`` is part of the key."""
    with Reader(Path(path)) as reader:
        return store.read_or_damaged(run_id, lambda: load_diagnosis(reader, run_id))


def _version(head: RunInfo, runs: Sequence[RunInfo]) -> str:
    concluded = zlib.crc32(run_rows.conclusion(store.path(), head.id).encode())
    return ",".join([f"{concluded:x}", *(f"{r.id}:{r.state}" for r in runs)])


def _is_moving(head: RunInfo, runs: Sequence[RunInfo]) -> bool:
    if any(r.state.is_active for r in runs) or job_is_running(head.spec.workload):
        return True
    ended = max((r.ended for r in runs if r.ended is not None), default=0.0)
    return time.time() - ended < BETWEEN_RUNS_S


def data_version(case: DiagnosisCase) -> str:
    """Changes whenever a run was added or has ended."""
    return f"{_version(case.head, case.runs)}:{case.is_moving}"


def bare(run: RunInfo) -> RunView:
    """The run without its observations, for words that need none."""
    return RunView(run.spec.control, run.id, ())


def observed(run: RunInfo) -> RunView:
    """A run's observations by kind."""
    return RunView(run.spec.control, run.id, observations(run))


@store.of_run
def observations(reader: Reader, run_id: str) -> list[Observation]:
    """All observations of a script's run, in order."""
    return reader.observations(run_id)


def start_diagnosis(
    script: Path,
    policy: str,
    steps: int,
    args: Sequence[str] = (),
    time_limit_s: float = 0.0,
    python: str = OWN_PYTHON,
) -> None:
    """Diagnose a script of the zoo, or one below the operator's folder. ``steps`` and
    ``time_limit_s`` of each run are the command's own default where 0; ``python`` is a name that
    the operator gave. Raises BadInput for another."""
    permissions.require(permissions.is_trusted(), "starting a diagnosis")
    _jobs[str(script)] = script_runs.start_diagnosis(
        script,
        store.path(),
        policy=policy,
        steps=steps,
        time_limit_s=time_limit_s,
        args=args,
        python=_executable(python),
    )
    _python_of[str(script)] = python


def start_captured(
    run: RunInfo, capsule: Path, file: Path, function: str, *, trusted: bool
) -> None:
    """Diagnose the step of a capsule that ``run`` of this store has kept. The started process
    imports ``file``, which the caller has found below the operator's folder.

    Raises BadInput unless the user has said that the file is trusted, for an imported run, and
    where there is no such capsule or ``function`` is no name.
    """
    permissions.require(permissions.is_trusted(), "starting a diagnosis")
    if not trusted:
        raise BadInput("The file is imported only after you have said that you trust it.")
    if run.spec.imported:  # its paths come from an untrusted file
        raise BadInput("This run was imported. Diagnose its capsule yourself, with the command.")
    if not capsule.is_file():
        raise BadInput(f"There is no capsule at {capsule} any more.")
    if not function.isidentifier():
        raise BadInput(f"{function!r} is not the name of a function.")
    trust = f"{file}:{function}"
    _jobs[str(capsule)] = script_runs.start_captured(capsule, trust, store.path())


def start_controls(run: RunInfo, controls: Sequence[str], python: str = OWN_PYTHON) -> None:
    """Run a recorded script again. Raises BadInput when its file is gone, and for a ``python`` that
    the operator did not name."""
    permissions.require(permissions.is_trusted(), "running a script")
    executable = _executable(python)
    _jobs[run.spec.workload] = script_runs.start_controls(
        store.path(), run.id, controls, executable
    )
    _python_of[run.spec.workload] = python


def pick_python(script: str, key: str) -> str:
    """A select box over the Pythons that the operator named and the dashboard's own; without others
    nothing is drawn. The one that ``script`` was last started with comes first to mind."""
    names = [OWN_PYTHON, *(python.name for python in options.current().pythons)]
    if len(names) == 1:
        return OWN_PYTHON
    last = _python_of.get(script, OWN_PYTHON)
    return st.selectbox(
        "Python",
        names,
        index=names.index(last) if last in names else 0,
        format_func=lambda name: name or "the dashboard's own",
        key=key,
        help="The operator names others with --python NAME=PATH.",
    )


def _executable(name: str) -> str:
    """Of a Python that the operator named; a browser sends a name and no path."""
    named = {python.name: python.executable for python in options.current().pythons}
    named[OWN_PYTHON] = sys.executable
    if name not in named:
        raise BadInput(f"This dashboard was started without --python {name}=PATH.")
    return named[name]


def job_is_running(script: str) -> bool:
    """Whether a job for ``script`` was started here and still runs."""
    job = _job(script)
    return job is not None and script_runs.is_running(job)


def busy_with() -> str:
    """The script whose job runs, or an empty text."""
    return next((script for script in _jobs if job_is_running(script)), "")


def job_problem(script: str) -> str:
    """Why the last job for ``script`` could not do its work, or an empty text."""
    job = _job(script)
    return script_runs.detached_words(job) if job is not None else ""


def _job(script: str) -> Job | None:
    """A class learns of jobs for lessons' scripts alone."""
    is_open = permissions.is_trusted() or permissions.comes_with_lesson(script)
    return _jobs.get(script) if is_open else None


def stop_runs(script: str, runs: Sequence[RunInfo]) -> None:
    """Ask the active ``runs`` to end, so that they say so in the store; then end the job."""
    permissions.require(permissions.is_trusted(), "stopping a diagnosis")
    active = [run for run in runs if run.state.is_active]
    for run in active:
        actions.cancel_run(run)
    _stopping.add(script)
    arguments = (store.path(), script, [r.id for r in active])
    threading.Thread(target=_end, args=arguments, daemon=True).start()


def _end(path: Path, script: str, run_ids: Sequence[str]) -> None:
    """Wait for the runs in a thread of its own: the page must not stand still meanwhile."""
    deadline = time.monotonic() + CANCEL_S
    try:
        while time.monotonic() < deadline and any(
            run_rows.one(path, i).state.is_active for i in run_ids
        ):
            time.sleep(0.2)
    except AmpscopeError:
        pass  # deleted meanwhile: nothing to wait for
    job = _jobs.get(script)
    if job is not None:
        script_runs.stop(job)
    _stopping.discard(script)


def is_stopping(script: str) -> bool:
    """Whether a person has asked for its end, which takes some seconds."""
    return script in _stopping
