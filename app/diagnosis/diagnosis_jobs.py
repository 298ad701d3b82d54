"""Diagnoses and fixes that were started from this dashboard: one at a time.

A diagnosis makes several runs, two of them at once; a second one beside it would only slow both.
Jobs are kept by the script's name, for all browsers alike, because they share one machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ampscope.errors import AmpscopeError
from ampscope.experiments import detached
from ampscope.experiments.detached import Job
from ampscope.records import RunInfo
from app import permissions, run_rows, store
from app.runs import probes

CANCEL_S = 10.0  # a run sees the request within 1 s and has 5 s to reach the end of its step
_jobs: dict[str, Job] = {}
_stopping: set[str] = set()


def start_diagnosis(script: Path, policy: str, steps: int) -> None:
    """Diagnose a script of the zoo."""
    permissions.require(permissions.is_trusted(), "starting a diagnosis")
    _jobs[str(script)] = detached.start_diagnosis(script, store.path(), policy=policy, steps=steps)


def start_controls(run: RunInfo, controls: Sequence[str]) -> None:
    """Run a recorded script again. Raises BadInput when its file is gone."""
    permissions.require(permissions.is_trusted(), "running a script")
    _jobs[run.spec.workload] = detached.start_controls(store.path(), run.id, controls)


def is_running(script: str) -> bool:
    """Whether a job for ``script`` was started here and still runs."""
    job = _job(script)
    return job is not None and detached.is_running(job)


def busy_with() -> str:
    """The script whose job runs, or an empty text."""
    return next((script for script in _jobs if is_running(script)), "")


def problem(script: str) -> str:
    """Why the last job for ``script`` could not do its work, or an empty text."""
    job = _job(script)
    return detached.last_words(job) if job is not None else ""


def _job(script: str) -> Job | None:
    """A class learns of jobs for lessons' scripts alone."""
    is_open = permissions.is_trusted() or permissions.comes_with_lesson(script)
    return _jobs.get(script) if is_open else None


def is_stopping(script: str) -> bool:
    """Whether a person has asked for its end, which takes some seconds."""
    return script in _stopping


def stop(script: str, runs: Sequence[RunInfo]) -> None:
    """Ask the active ``runs`` to end, so that they say so in the store; then end the job."""
    permissions.require(permissions.is_trusted(), "stopping a diagnosis")
    active = [run for run in runs if run.state.is_active]
    for run in active:
        probes.cancel(run)
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
        detached.stop(job)
    _stopping.discard(script)
