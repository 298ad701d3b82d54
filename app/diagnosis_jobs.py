"""Diagnoses and fixes that were started from this dashboard: one at a time.

A diagnosis makes several runs, two of them at once; a second one beside it would only slow both.
Jobs are kept by the script's name, for all browsers alike, because they share one machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ampscope.experiments import detached
from ampscope.experiments.detached import Job
from ampscope.records import RunInfo
from app import probes, store

CANCEL_S = 3.0  # a run looks for a request to stop once a second
_jobs: dict[str, Job] = {}


def start_diagnosis(script: Path, policy: str, steps: int) -> None:
    """Diagnose a script of the zoo."""
    _jobs[str(script)] = detached.start_diagnosis(script, store.path(), policy=policy, steps=steps)


def start_controls(run: RunInfo, controls: Sequence[str]) -> None:
    """Run a recorded script again. Raises BadInput when its file is gone."""
    _jobs[run.spec.workload] = detached.start_controls(store.path(), run.id, controls)


def is_running(script: str) -> bool:
    """Whether a job for ``script`` was started here and still runs."""
    job = _jobs.get(script)
    return job is not None and detached.is_running(job)


def busy_with() -> str:
    """The script whose job runs, or an empty text."""
    return next((script for script in _jobs if is_running(script)), "")


def problem(script: str) -> str:
    """Why the last job for ``script`` could not do its work, or an empty text."""
    job = _jobs.get(script)
    return detached.last_words(job) if job is not None else ""


def stop(script: str, runs: Sequence[RunInfo]) -> None:
    """Ask the active ``runs`` to end, so that they say so in the store; then end the job."""
    for run in runs:
        if run.state.is_active:
            probes.cancel(run)
    deadline = time.monotonic() + CANCEL_S
    while time.monotonic() < deadline and any(store.run(r.id).state.is_active for r in runs):
        time.sleep(0.1)
    job = _jobs.get(script)
    if job is not None:
        detached.stop(job)
