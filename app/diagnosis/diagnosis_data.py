"""The diagnoses that the store holds: the runs of one script under its controls, and the verdict.

Runs that were started together share a group. The verdict is computed from the group's evidence
and kept until a run is added or ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from ampscope.analysis.run_view import RunView
from ampscope.errors import BadInput
from ampscope.observations import Observation
from ampscope.records import AS_IS, RunInfo
from ampscope.store.reader import Reader
from ampscope.verdicts.recall import counting, recall
from ampscope.verdicts.report import Report
from app import store
from app.diagnosis import diagnosis_jobs

RUNS_READ = 4_000  # a zoo of 72 scripts has about 400 runs
BETWEEN_RUNS_S = 5.0  # a diagnosis thinks for less than a second between two runs


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One diagnosed script: its runs, and what is known of it so far."""

    head: RunInfo  # the run as it is; of a group without one, its first
    runs: tuple[RunInfo, ...]  # oldest first
    report: Report | None  # None while the script as it is has not ended
    is_moving: bool  # a run is under way, or the next one is about to start

    @property
    def script(self) -> str:
        """The script's path, or ``-m package.module``."""
        return self.head.spec.workload

    def run_of(self, control: str) -> RunInfo | None:
        """The run that counts for ``control``."""
        return next((r for r in reversed(counting(self.runs)) if r.spec.control == control), None)


def runs() -> list[RunInfo]:
    """All runs of scripts, newest first."""
    return [run for run in store.runs(RUNS_READ) if run.spec.kind == "script"]


def heads(runs: Sequence[RunInfo]) -> list[RunInfo]:
    """One run for each group, newest first."""
    found: dict[str, RunInfo] = {}
    for run in runs:
        key = run.spec.group or run.id
        kept = found.get(key)
        # Newest first: the newest run as it is stands for its group, else the group's oldest run.
        if kept is None or kept.spec.control != AS_IS:
            found[key] = run
    return list(found.values())


def opened(head: RunInfo, runs: Sequence[RunInfo]) -> Case:
    """The case that ``head`` stands for, with the verdict as far as there is one."""
    group = head.spec.group
    own = tuple(r for r in reversed(runs) if group and r.spec.group == group) or (head,)
    return Case(head, own, _report(head, own), _is_moving(head, own))


def version(case: Case) -> str:
    """Changes whenever a run was added or has ended."""
    return f"{_version(case.runs)}:{case.is_moving}"


def view(run: RunInfo) -> RunView:
    """A run's observations by kind."""
    return RunView(run.spec.control, run.id, observations(run))


@store.of_run
def observations(reader: Reader, run_id: str) -> list[Observation]:
    """All that was seen of a script's run, in order."""
    return reader.observations(run_id)


def _report(head: RunInfo, runs: Sequence[RunInfo]) -> Report | None:
    try:
        return store.as_visible(_recalled(str(store.path()), head.id, _version(runs)))
    except BadInput:  # the script as it is still runs
        return None


@st.cache_data(show_spinner=False, max_entries=400)
def _recalled(path: str, run_id: str, version: str) -> Report:
    """``version`` is part of the key."""
    with Reader(Path(path)) as reader:
        return store.read_or_damaged(run_id, lambda: recall(reader, run_id))


def _version(runs: Sequence[RunInfo]) -> str:
    return ",".join(f"{r.id}:{r.state}" for r in runs)


def _is_moving(head: RunInfo, runs: Sequence[RunInfo]) -> bool:
    if any(r.state.is_active for r in runs) or diagnosis_jobs.is_running(head.spec.workload):
        return True
    ended = max((r.ended for r in runs if r.ended is not None), default=0.0)
    return time.time() - ended < BETWEEN_RUNS_S
