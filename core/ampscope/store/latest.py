"""The newest rows of the runs that are going on: what a monitor asks every few seconds.

Reads a handful of rows a run however long it is. Totals would need all of them, so they are carried
on: :func:`advanced` counts only the steps that came since the totals it is given.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ampscope.exponents import Raw
from ampscope.records import Role, RunInfo, StepRecord
from ampscope.store import frames, rows
from ampscope.store.reader import Reader

_LARGEST = 1.7976931348623157e308  # above it: infinity, and the text 'nan', which sorts after all


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the steps up to ``step``; ``nonfinite`` ones had a loss or a gradient with NaN or Inf."""

    step: int = -1
    steps: int = 0
    skipped: int = 0
    nonfinite: int = 0


def current_runs(reader: Reader, within_s: float) -> list[RunInfo]:
    """Runs that go on, and those that ended, or gave their last sign of life, ``within_s`` ago."""
    since = time.time() - within_s
    sql = (
        f"SELECT {rows.RUN} FROM run WHERE ended>?1 OR"
        " (ended IS NULL AND state IN ('queued','running')) ORDER BY created, id"
    )
    infos = [rows.run_info(row) for row in reader._all(sql, since)]
    return [i for i in infos if i.state.is_active or i.ended or (i.heartbeat or i.created) > since]


def last_step(reader: Reader, run_id: str) -> StepRecord | None:
    """The newest step, None before the first."""
    sql = f"SELECT {rows.STEP} FROM step WHERE run=? ORDER BY step DESC LIMIT 1"
    found = reader._all(sql, run_id)
    return rows.step(found[0]) if found else None


def advanced(reader: Reader, run_id: str, before: Totals) -> Totals:
    """``before`` and the steps since."""
    sql = "SELECT max(step), count(*), sum(skipped) FROM step WHERE run=? AND step>?"
    step, steps, skipped = reader._all(sql, run_id, before.step)[0]
    if step is None:
        return before
    sql = (
        "SELECT count(*) FROM (SELECT step FROM step WHERE run=?1 AND step>?2 AND step<=?3"
        " AND (loss>?4 OR loss<-?4)"
        " UNION SELECT step FROM nonfinite WHERE run=?1 AND step>?2 AND step<=?3)"
    )
    nonfinite = reader._all(sql, run_id, before.step, step, _LARGEST)[0][0]
    return Totals(
        step, before.steps + steps, before.skipped + skipped, before.nonfinite + nonfinite
    )


def last_histogram(reader: Reader, run_id: str, role: Role) -> Raw | None:
    """The newest histogram of a role, all modules added up, as recorded (not unscaled)."""
    sql = "SELECT blob FROM frame WHERE run=? AND role=? ORDER BY step DESC LIMIT 1"
    found = reader._all(sql, run_id, role)
    return np.asarray(frames.unpack(found[0][0])[2].sum(axis=0)) if found else None


def last_lost_shares(reader: Reader, run_id: str) -> dict[Role, float]:
    """Share of the elements that half precision lost at the newest step with an fp32 shadow."""
    sql = (
        "SELECT role, sum(lost), sum(total) FROM shadow WHERE run=?1"
        " AND step=(SELECT max(step) FROM shadow WHERE run=?1) GROUP BY role"
    )
    found = reader._all(sql, run_id)
    return {Role(role): lost / total for role, lost, total in found if total}
