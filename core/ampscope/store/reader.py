"""Read a store: frozen records and numpy arrays, never SQLite rows.

A reader holds one read-only connection; runs may be written at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampscope.errors import BadInput
from ampscope.observations import Observation
from ampscope.records import (
    Event,
    Frame,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Result,
    Role,
    RunInfo,
    Sample,
    ShadowRecord,
    State,
    StepRecord,
    StepTotals,
)
from ampscope.store import db, overview, result_codec, rows, sample_thinning
from ampscope.store.observation_codec import decode


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
        """Close the connection; nothing can be read afterwards."""
        self._connection.close()

    def runs(self, limit: int = 200) -> list[RunInfo]:
        """Newest first."""
        sql = f"SELECT {rows.RUN} FROM run ORDER BY created DESC, id DESC LIMIT ?"
        return self._with_places([rows.run_info(row) for row in self._all(sql, limit)])

    def run(self, run_id: str) -> RunInfo:
        """By id or a unique beginning of it. Raises BadInput otherwise."""
        sql = f"SELECT {rows.RUN} FROM run WHERE substr(id, 1, ?) = ? LIMIT 2"
        found = self._all(sql, len(run_id), run_id)
        if len(found) != 1 or not run_id:
            what = "matches several runs" if found and run_id else "is not in this store"
            raise BadInput(f"Run {run_id!r} {what}. List them with: ampscope runs list")
        info = rows.run_info(found[0])
        if info.state is State.LOST:  # its process may have written its end since, and gone
            info = rows.run_info((self._all(sql, len(run_id), run_id) or found)[0])
        info = self._with_places([info])[0]
        return dataclasses.replace(info, overhead_share=overview.overhead_share(self._all, info.id))

    def active(self) -> list[RunInfo]:
        """Runs that wait or work now, oldest first."""
        sql = f"SELECT {rows.RUN} FROM run WHERE state IN ('queued', 'running') ORDER BY created"
        return [run for run in map(rows.run_info, self._all(sql)) if run.state.is_active]

    def group(self, group: str) -> list[RunInfo]:
        """Runs that were started together, oldest first."""
        return [r for r in reversed(self.runs(10_000)) if group and r.spec.group == group]

    def steps(self, run_id: str) -> list[StepRecord]:
        """All steps in order."""
        sql = f"SELECT {rows.STEP} FROM step WHERE run=? ORDER BY step"
        return [rows.step(row) for row in self._all(sql, run_id)]

    def overview(
        self, run_id: str, points: int = 2000, first: int | None = None, last: int | None = None
    ) -> list[StepRecord]:
        """Real steps of a run of any length, from first to last: about ``points``, three times that
        at the worst. All, where they are no more. Else of each block of consecutive steps those of
        the smallest and the largest loss, every change of scale and all bad steps (skipped, loss or
        norm not finite); if either are more than points / 2, the ends of each episode of bad steps,
        or the first and last of each block. No value is smoothed."""
        return overview.overview(self._all, run_id, points, first, last)

    def step_totals(self, run_id: str) -> StepTotals:
        """Exact counts over all steps, in a time that does not depend on how many there are."""
        return overview.totals(self._all, run_id)

    def modules(self, run_id: str) -> list[ModuleRecord]:
        """In the order of ``named_modules``."""
        sql = f"SELECT {rows.MODULE} FROM module WHERE run=? ORDER BY module"
        return [rows.module(row) for row in self._all(sql, run_id)]

    def ops(self, run_id: str, op_set: int) -> list[OpRecord]:
        """Of the steps whose ``op_set`` this is."""
        sql = f"SELECT {rows.OP} FROM op WHERE run=? AND op_set=?"
        return [rows.op(row) for row in self._all(sql, run_id, op_set)]

    def frame_steps(self, run_id: str, role: Role) -> list[int]:
        """Steps that have histograms of ``role``; of frames that add up several, the first."""
        return [step for step, _ in self.frame_spans(run_id, role)]

    def frame_spans(self, run_id: str, role: Role) -> list[tuple[int, int]]:
        """First and last step of every frame of ``role``; the same where it is of one step."""
        sql = (
            "SELECT step,coalesce(last_step,step) FROM frame INDEXED BY frame_span"
            " WHERE run=? AND role=? ORDER BY step"
        )
        return [rows.span(row) for row in self._all(sql, run_id, role)]

    def frame(self, run_id: str, role: Role, step: int) -> Frame | None:
        """Histograms of one role that cover a step, or None when none were taken. A frame whose
        ``last_step`` is set adds up several steps."""
        sql = (
            f"SELECT {rows.FRAME} FROM frame WHERE run=?1 AND role=?2 AND step=(SELECT step FROM"
            " frame INDEXED BY frame_span WHERE run=?1 AND role=?2 AND step<=?3"
            " AND coalesce(last_step,step)>=?3 ORDER BY step DESC LIMIT 1)"
        )
        found = self._all(sql, run_id, role, step)
        return rows.frame(role, found[0]) if found else None

    def frames(self, run_id: str, role: Role) -> Iterator[Frame]:
        """All frames of a role in step order, decoded one at a time."""
        sql = f"SELECT {rows.FRAME} FROM frame WHERE run=? AND role=? ORDER BY step"
        with db.translated(self.path):
            cursor = self._connection.execute(sql, (run_id, role))
            for row in cursor:
                yield rows.frame(role, row)

    def events(self, run_id: str) -> list[Event]:
        """What a watched run reported, in order."""
        sql = f"SELECT {rows.EVENT} FROM event WHERE run=? ORDER BY seq"
        return [rows.event(row) for row in self._all(sql, run_id)]

    def shadows(
        self, run_id: str, role: Role | None = None, step: int | None = None
    ) -> list[ShadowRecord]:
        """Half precision against the fp32 shadow, at its steps or at one of them."""
        at_step = " AND step=?3" if step is not None else ""
        sql = (
            f"SELECT {rows.SHADOW} FROM shadow WHERE run=?1{at_step} AND (?2 IS NULL OR role=?2)"
            " ORDER BY step,module"
        )
        values = (run_id, role) if step is None else (run_id, role, step)
        return [rows.shadow(row) for row in self._all(sql, *values)]

    def observations(self, run_id: str) -> list[Observation]:
        """What was seen of a script, in order; empty for a probe."""
        sql = "SELECT kind,data FROM observation WHERE run=? ORDER BY seq"
        return [decode(kind, data) for kind, data in self._all(sql, run_id)]

    def results(self, run_id: str) -> list[Result]:
        """What a measurement found, in order."""
        sql = "SELECT kind,data FROM result WHERE run=? ORDER BY seq"
        return [result_codec.decode(kind, data) for kind, data in self._all(sql, run_id)]

    def samples(self, run_id: str, points: int = 0) -> list[Sample]:
        """What devices read beside a run, in the order of time; with ``points`` about so many of
        each device, all extremes among them and none invented."""
        sql = f"SELECT {rows.SAMPLE} FROM telemetry WHERE run=? ORDER BY at,device"
        found = sample_thinning.of_devices(self._all(sql, run_id), points)
        return [rows.sample(row) for row in found]

    def nonfinite(self, run_id: str, step: int | None = None) -> list[NonFiniteRecord]:
        """Parameters with NaN or Inf gradients, in backward order."""
        sql = (
            f"SELECT {rows.NONFINITE} FROM nonfinite"
            ' WHERE run=? AND (?2 IS NULL OR step=?2) ORDER BY step,"order"'
        )
        return [rows.nonfinite(row) for row in self._all(sql, run_id, step)]

    def is_next(self, run_id: str) -> bool:
        """Whether no other run waits in front of this one for the same device. A run that has not
        named its device yet (it is still starting) may want any."""
        return self.run(run_id).place <= 1

    def _all(self, sql: str, *values: object) -> Sequence[rows.Row]:
        with db.translated(self.path):
            return self._connection.execute(sql, values).fetchall()

    def _with_places(self, runs: list[RunInfo]) -> list[RunInfo]:
        """Fill in the place in the queue of every waiting run."""
        if not any(run.state is State.QUEUED for run in runs):
            return runs
        sql = f"SELECT {rows.RUN} FROM run WHERE state='queued' ORDER BY created, id"
        waiting = [i for i in map(rows.run_info, self._all(sql)) if i.state is State.QUEUED]
        places = {info.id: _place(info, waiting[:n]) for n, info in enumerate(waiting)}
        return [dataclasses.replace(run, place=places.get(run.id, 0)) for run in runs]


def _place(info: RunInfo, before: list[RunInfo]) -> int:
    """1 for the run that its device takes next."""
    return 1 + sum(_may_share_device(info, other) for other in before)


def _may_share_device(first: RunInfo, second: RunInfo) -> bool:
    devices = [run.machine.device for run in (first, second) if run.machine is not None]
    return len(devices) < 2 or devices[0] == devices[1]
