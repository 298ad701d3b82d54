"""Frameworks of a comparison whose run did not come to its end, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.records import RunInfo, State
from app import states
from app.frameworks.frameworks_tables import TITLES
from app.text import plural

_ENDED = {**states.ENDED, State.FINISHED: "recorded no layer"}


def unfinished(runs: Sequence[RunInfo], compared: Sequence[RunInfo]) -> list[RunInfo]:
    """The newest run of each framework that is not compared, and runs that are and ended early."""
    of = {run.spec.framework: run for run in sorted(runs, key=lambda run: run.created)}
    of |= {run.spec.framework: run for run in compared}
    return [run for run in of.values() if run not in compared or run.state is not State.FINISHED]


def words(run: RunInfo, is_compared: bool) -> str:
    """How it ended, as part of the page's sentence."""
    after = f" after {plural(run.steps_done, 'step')}" if run.steps_done else ""
    ended = _ENDED.get(run.state, run.state.value) + after
    return f"{TITLES[run.spec.framework]} {ended}" + ("" if is_compared else ": not compared")
