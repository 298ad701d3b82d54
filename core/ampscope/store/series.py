"""Reads that never build a whole frame: over many steps, for views of one module or one run; and
the newest rows of the runs that are going on, for a monitor.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from ampscope.numerics.histogram import RAW_LEN, Raw
from ampscope.records import Role, RunInfo, StepRecord
from ampscope.store import codec, frames, rows
from ampscope.store.reader import Reader


@dataclass(frozen=True, slots=True)
class ModuleSeries:
    """One module's histograms over time; ``scales`` are the loss scales in them. A row adds up the
    steps from ``steps`` to ``last_steps``, which are the same where it is of one step."""

    steps: tuple[int, ...]
    scales: tuple[float, ...]
    rows: Raw  # [steps, RAW_LEN]
    last_steps: tuple[int, ...] = ()


def module_series(reader: Reader, run_id: str, role: Role, module: int) -> ModuleSeries:
    """All recorded steps of a role; 0.13 ms a frame of 500 modules."""
    sql = (
        "SELECT step,scale,blob,coalesce(last_step,step) FROM frame WHERE run=? AND role=?"
        " ORDER BY step"
    )
    steps: list[int] = []
    last_steps: list[int] = []
    scales: list[float] = []
    rows: list[Raw] = []
    for step, scale, blob, last_step in reader._all(sql, run_id, role):
        row = frames.unpack_module(blob, module)
        if row is not None:
            steps.append(step)
            last_steps.append(last_step)
            scales.append(codec.real(scale) or 0.0)
            rows.append(row)
    counts = np.array(rows, np.int64).reshape(len(rows), RAW_LEN)
    return ModuleSeries(tuple(steps), tuple(scales), counts, tuple(last_steps))


def first_nonfinite(reader: Reader, run_id: str) -> dict[int, tuple[int, str]]:
    """Step -> (parameters with NaN or Inf gradients, the first of them in backward order)."""
    # With a single min(), SQLite takes the bare column from the row that holds the minimum.
    sql = 'SELECT step, count(*), min("order"), parameter FROM nonfinite WHERE run=? GROUP BY step'
    return {step: (count, name) for step, count, _, name in reader._all(sql, run_id)}


def bad_gradients(
    reader: Reader, run_id: str, first_step: int = 0
) -> dict[int, tuple[int, int, int, int, float | None]]:
    """Step -> elements with NaN and with Inf in the first bad gradient in backward order and in all
    of them; and the largest magnitude of the same gradients in fp32, where a shadow was taken."""
    sql = (
        "SELECT step, nan, pos_inf + neg_inf FROM nonfinite WHERE run=? AND step>=?"
        ' ORDER BY step,"order"'
    )
    found: dict[int, list[int]] = {}
    for step, nan, inf in reader._all(sql, run_id, first_step):
        counts = found.setdefault(step, [nan, inf, 0, 0])
        counts[2] += nan
        counts[3] += inf
    # Where the half gradient is not finite, its distance from fp32's is not finite either.
    sql = (
        "SELECT step, max_abs_fp32 FROM shadow WHERE run=? AND step>=? AND role='weight_grad'"
        " AND relative_error IN ('nan', 9e999)"
    )
    largest: dict[int, float] = {}
    for step, value in reader._all(sql, run_id, first_step):
        number = codec.real(value)
        if number is not None and not largest.get(step, 0.0) >= number:
            largest[step] = number if not math.isnan(largest.get(step, 0.0)) else math.nan
    return {step: (*_four(counts), largest.get(step)) for step, counts in found.items()}


def _four(counts: list[int]) -> tuple[int, int, int, int]:
    return counts[0], counts[1], counts[2], counts[3]


def last_shadow_step(reader: Reader, run_id: str) -> int | None:
    """The newest step that has an fp32 shadow: one look into the index, however many there are."""
    step: int | None = reader._all("SELECT max(step) FROM shadow WHERE run=?", run_id)[0][0]
    return step


def shadow_columns(reader: Reader, run_id: str, role: Role) -> Raw:
    """Shadow counts of a role as one array [records, 7]: step, module, total, lost, subnormal,
    zero_before, below_range. A tenth of the time of
    building 50,000 records."""
    sql = (
        "SELECT step,module,total,lost,subnormal,zero_before,below_range FROM shadow"
        " WHERE run=? AND role=? ORDER BY step,module"
    )
    rows = reader._all(sql, run_id, role)
    return np.array(rows, np.int64).reshape(len(rows), 7)


_LARGEST = 1.7976931348623157e308  # above it: infinity, and the text 'nan', which sorts after all


@dataclass(frozen=True, slots=True)
class Totals:
    """What a monitor asks every few seconds, of the steps up to ``step``; ``nonfinite`` ones had a
    loss or a gradient with NaN or Inf."""

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
    found = rows.select(reader._all, StepRecord, "ORDER BY step DESC LIMIT 1", run_id)
    return found[0] if found else None


def advanced(reader: Reader, run_id: str, before: Totals) -> Totals:
    """``before`` and the steps since: however long a run is, only those that came since are
    counted."""
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
