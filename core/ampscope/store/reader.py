"""Read a store: frozen records and numpy arrays, never SQLite rows.

A reader holds one read-only connection; runs may be written at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ampscope.errors import BadInput
from ampscope.exponents import RAW_LEN, Raw
from ampscope.observations import Observation
from ampscope.records import (
    Frame,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    RunInfo,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store import codec, db, frames
from ampscope.store.observation_codec import decode
from ampscope.store.processes import HEARTBEAT_STALE_S, is_alive

_STEP = (
    "step,loss,scale,growth_counter,skipped,grad_norm,lr,step_time_s,overhead_s,peak_bytes,"
    "moved_share,op_set"
)


class Reader:
    """Read-only view of one store; use as a context manager or :meth:`close` it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection = db.open_for_reading(path)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def runs(self, limit: int = 200) -> list[RunInfo]:
        """Newest first."""
        rows = self._all("SELECT * FROM run ORDER BY created DESC, id DESC LIMIT ?", limit)
        return self._with_places([_run_info(r) for r in rows])

    def run(self, run_id: str) -> RunInfo:
        """By id or a unique beginning of it. Raises BadInput otherwise."""
        rows = self._all("SELECT * FROM run WHERE substr(id, 1, ?) = ?", len(run_id), run_id)
        if len(rows) != 1 or not run_id:
            what = "matches several runs" if rows and run_id else "is not in this store"
            raise BadInput(f"Run {run_id!r} {what}. List them with: ampscope runs list")
        return self._with_places([_run_info(rows[0])])[0]

    def group(self, group: str) -> list[RunInfo]:
        """Runs that were started together, oldest first."""
        return [r for r in reversed(self.runs(10_000)) if group and r.spec.group == group]

    def steps(self, run_id: str) -> list[StepRecord]:
        """All steps in order."""
        sql = f"SELECT {_STEP} FROM step WHERE run=? ORDER BY step"
        return [_step(row) for row in self._all(sql, run_id)]

    def modules(self, run_id: str) -> list[ModuleRecord]:
        """In the order of ``named_modules``."""
        sql = (
            "SELECT module,path,type,weight_dtypes,parameter_count,is_leaf,shared_with"
            " FROM module WHERE run=? ORDER BY module"
        )
        return [
            ModuleRecord(r[0], r[1], r[2], r[3], r[4], bool(r[5]), r[6])
            for r in self._all(sql, run_id)
        ]

    def ops(self, run_id: str, op_set: int) -> list[OpRecord]:
        sql = (
            "SELECT module,phase,op,inputs,outputs,count,flops,is_cast FROM op"
            " WHERE run=? AND op_set=?"
        )
        rows = self._all(sql, run_id, op_set)
        return [OpRecord(*r[:7], is_cast=bool(r[7])) for r in rows]

    def frame_steps(self, run_id: str, role: Role) -> list[int]:
        """Steps that have histograms of ``role``."""
        sql = "SELECT step FROM frame WHERE run=? AND role=? ORDER BY step"
        return [r[0] for r in self._all(sql, run_id, role)]

    def frame(self, run_id: str, role: Role, step: int) -> Frame | None:
        sql = "SELECT step,scale,blob FROM frame WHERE run=? AND role=? AND step=?"
        rows = self._all(sql, run_id, role, step)
        return _frame(role, rows[0]) if rows else None

    def frames(self, run_id: str, role: Role) -> Iterator[Frame]:
        """All frames of a role in step order, decoded one at a time."""
        sql = "SELECT step,scale,blob FROM frame WHERE run=? AND role=? ORDER BY step"
        with db.translated(self.path):
            cursor = self._connection.execute(sql, (run_id, role))
            for row in cursor:
                yield _frame(role, row)

    def module_rows(
        self, run_id: str, role: Role, module: int
    ) -> tuple[list[int], Raw, list[float]]:
        """One module over time: steps, rows [steps, RAW_LEN], loss scale in those rows."""
        steps: list[int] = []
        rows: list[Raw] = []
        scales: list[float] = []
        for frame in self.frames(run_id, role):
            row = frame.row_of(module)
            if row is not None:
                steps.append(frame.step)
                rows.append(row)
                scales.append(frame.scale)
        return steps, np.array(rows, np.int64).reshape(len(rows), RAW_LEN), scales

    def shadows(self, run_id: str, role: Role | None = None) -> list[ShadowRecord]:
        sql = (
            "SELECT step,module,role,total,lost,subnormal,zero_before,relative_error,cosine,"
            "max_abs_fp32 FROM shadow WHERE run=? AND (?2 IS NULL OR role=?2)"
            " ORDER BY step,module"
        )
        return [
            ShadowRecord(r[0], r[1], Role(r[2]), *r[3:7], *(db.from_sql(v) for v in r[7:10]))
            for r in self._all(sql, run_id, role)
        ]

    def nonfinite(self, run_id: str, step: int | None = None) -> list[NonFiniteRecord]:
        """Parameters with NaN or Inf gradients, in backward order."""
        sql = (
            'SELECT step,parameter,"order",total,nan,pos_inf,neg_inf FROM nonfinite'
            ' WHERE run=? AND (?2 IS NULL OR step=?2) ORDER BY step,"order"'
        )
        return [NonFiniteRecord(*r) for r in self._all(sql, run_id, step)]

    def observations(self, run_id: str) -> list[Observation]:
        """What was seen of a script, in order; empty for a probe."""
        sql = "SELECT kind,data FROM observation WHERE run=? ORDER BY seq"
        return [decode(kind, data) for kind, data in self._all(sql, run_id)]

    def _all(self, sql: str, *values: object) -> Sequence[tuple[Any, ...]]:
        with db.translated(self.path):
            return self._connection.execute(sql, values).fetchall()

    def _with_places(self, runs: list[RunInfo]) -> list[RunInfo]:
        """Fill in the place in the queue of every waiting run."""
        import dataclasses

        if not any(r.state is State.QUEUED for r in runs):
            return runs
        rows = self._all("SELECT * FROM run WHERE state='queued' ORDER BY created, id")
        waiting = [i.id for i in map(_run_info, rows) if i.state is State.QUEUED]
        return [
            dataclasses.replace(r, place=waiting.index(r.id) + 1) if r.id in waiting else r
            for r in runs
        ]


def _run_info(row: tuple[Any, ...]) -> RunInfo:
    (id_, spec, state, created, started, ended, heartbeat, pid, pid_started, machine) = row[:10]
    message, traceback, steps_done = row[10:13]
    shown = State(state)
    if shown.is_active:
        silent = time.time() - (heartbeat or created) > HEARTBEAT_STALE_S
        if silent or not is_alive(pid, pid_started):
            shown = State.LOST
            message = message or (
                f"The process ended without a word after {steps_done} steps (killed, or out of "
                "memory). What it recorded is kept."
            )
    return RunInfo(
        id=id_,
        spec=codec.spec_from_json(spec),
        state=shown,
        created=created,
        started=started,
        ended=ended,
        heartbeat=heartbeat,
        pid=pid,
        machine=codec.machine_from_json(machine),
        message=message,
        traceback=traceback,
        steps_done=steps_done,
        overhead_share=None,
    )


def _step(row: tuple[Any, ...]) -> StepRecord:
    step, loss, scale, counter, skipped, norm, lr, time_s, overhead, peak, moved, op_set = row
    return StepRecord(
        step=step,
        loss=db.from_sql(loss),
        scale=db.from_sql(scale),
        growth_counter=counter,
        skipped=bool(skipped),
        grad_norm=db.from_sql(norm),
        lr=db.from_sql(lr),
        step_time_s=time_s,
        overhead_s=overhead,
        peak_bytes=peak,
        moved_share=moved,
        op_set=op_set,
    )


def _frame(role: Role, row: tuple[Any, ...]) -> Frame:
    step, scale, blob = row
    modules, dtypes, rows = frames.unpack(blob)
    return Frame(step, role, modules, dtypes, rows, db.from_sql(scale) or 0.0)
