"""Read a store: frozen records and numpy arrays, never SQLite rows.

A reader holds one read-only connection; runs may be written at the same time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampscope import records
from ampscope.errors import BadInput, StoreError
from ampscope.observations import Observation
from ampscope.store import codec, db, rows, samples
from ampscope.store.codec import decode_observation
from ampscope.store.pyramid import BAD, SIZES, TOP, Query, StepBlock, combined, cover, cover_evenly

Range = tuple[int, int]


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

    def runs(self, limit: int = 200) -> list[records.RunInfo]:
        """Newest first."""
        sql = f"SELECT {rows.RUN} FROM run ORDER BY created DESC, id DESC LIMIT ?"
        return self._with_places([rows.run_info(row) for row in self._all(sql, limit)])

    def run(self, run_id: str) -> records.RunInfo:
        """By id or a unique beginning of it. Raises BadInput otherwise."""
        sql = f"SELECT {rows.RUN} FROM run WHERE substr(id, 1, ?) = ? LIMIT 2"
        found = self._all(sql, len(run_id), run_id)
        if len(found) != 1 or not run_id:
            what = "matches several runs" if found and run_id else "is not in this store"
            raise BadInput(f"Run {run_id!r} {what}. List them with: ampscope runs list")
        info = rows.run_info(found[0])
        if info.state is records.State.LOST:  # its process may have written its end since, and gone
            info = rows.run_info((self._all(sql, len(run_id), run_id) or found)[0])
        info = self._with_places([info])[0]
        return dataclasses.replace(info, overhead_share=overhead_share(self._all, info.id))

    def active(self) -> list[records.RunInfo]:
        """Runs that wait or work now, oldest first."""
        sql = f"SELECT {rows.RUN} FROM run WHERE state IN ('queued', 'running') ORDER BY created"
        return [run for run in map(rows.run_info, self._all(sql)) if run.state.is_active]

    def conclusion(self, run_id: str) -> str:
        """What was stored when the diagnosis of this baseline run ended; "" when nothing was."""
        found = self._all("SELECT data FROM conclusion WHERE run=?", run_id)
        return codec.text(found[0][0], longest=codec.LONGEST_CONCLUSION) if found else ""

    def verdicts(self) -> dict[str, StoredVerdict]:
        """Baseline run -> its stored conclusion in a few words, of all in the store."""
        fields = ("verdict", "findings[0].cause", "latent[0].cause")
        found = [f"json_extract(data, '$.diagnosis.{field}')" for field in fields]
        found.append("json_extract(data, '$.could_not_run') <> ''")
        sql = f"SELECT run, {', '.join(found)} FROM conclusion WHERE json_valid(data)"
        return {
            run: StoredVerdict(
                codec.text(word), _id(cause), _id(latent), could_not_run=bool(not_run)
            )
            for run, word, cause, latent, not_run in self._all(sql)
            if type(word) is str
        }

    def with_alarms(self) -> frozenset[str]:
        """Watched runs that have reported an alarm."""
        return frozenset(run for (run,) in self._all("SELECT run FROM event WHERE kind='alarm'"))

    def group(self, group: str) -> list[records.RunInfo]:
        """Runs that were started together, oldest first."""
        if not group:
            return []
        named = "CASE WHEN json_valid(spec) THEN json_extract(spec, '$.group') END"
        sql = f"SELECT {rows.RUN} FROM run WHERE {named} = ? ORDER BY created, id"
        return self._with_places([rows.run_info(row) for row in self._all(sql, group)])

    def steps(self, run_id: str) -> list[records.StepRecord]:
        """All steps in order."""
        return rows.select(self._all, records.StepRecord, "ORDER BY step", run_id)

    def overview(
        self, run_id: str, points: int = 2000, first: int | None = None, last: int | None = None
    ) -> list[records.StepRecord]:
        """Real steps of a run of any length, from first to last: about ``points``, three times that
        at the worst. All, where they are no more. Else of each block of consecutive steps those of
        the smallest and the largest loss, every change of scale and all bad steps (skipped, loss or
        norm not finite); if either are more than points / 2, the ends of each episode of bad steps,
        or the first and last of each block. No value is smoothed."""
        return overview(self._all, run_id, points, first, last)

    def step_totals(self, run_id: str) -> records.StepTotals:
        """Exact counts over all steps, in a time that does not depend on how many there are."""
        return totals(self._all, run_id)

    def modules(self, run_id: str) -> list[records.ModuleRecord]:
        """In the order of ``named_modules``."""
        return rows.select(self._all, records.ModuleRecord, "ORDER BY module", run_id)

    def ops(self, run_id: str, op_set: int) -> list[records.OpRecord]:
        """Of the steps whose ``op_set`` this is."""
        return rows.select(self._all, records.OpRecord, "AND op_set=?", run_id, op_set)

    def frame_steps(self, run_id: str, role: records.Role) -> list[int]:
        """Steps that have histograms of ``role``; of frames that add up several, the first."""
        return [step for step, _ in self.frame_spans(run_id, role)]

    def frame_spans(self, run_id: str, role: records.Role) -> list[tuple[int, int]]:
        """First and last step of every frame of ``role``; the same where it is of one step."""
        sql = (
            "SELECT step,coalesce(last_step,step) FROM frame INDEXED BY frame_span"
            " WHERE run=? AND role=? ORDER BY step"
        )
        return [rows.span(row) for row in self._all(sql, run_id, role)]

    def frame(self, run_id: str, role: records.Role, step: int) -> records.Frame | None:
        """Histograms of one role that cover a step, or None when none were taken. A frame whose
        ``last_step`` is set adds up several steps."""
        sql = (
            f"SELECT {rows.FRAME} FROM frame WHERE run=?1 AND role=?2 AND step=(SELECT step FROM"
            " frame INDEXED BY frame_span WHERE run=?1 AND role=?2 AND step<=?3"
            " AND coalesce(last_step,step)>=?3 ORDER BY step DESC LIMIT 1)"
        )
        found = self._all(sql, run_id, role, step)
        return rows.frame(role, found[0]) if found else None

    def frames(self, run_id: str, role: records.Role) -> Iterator[records.Frame]:
        """All frames of a role in step order, decoded one at a time."""
        sql = f"SELECT {rows.FRAME} FROM frame WHERE run=? AND role=? ORDER BY step"
        with db.translated(self.path):
            last: int | None = None
            for row in self._connection.execute(sql, (run_id, role)):
                frame = rows.frame(role, row)
                # Pages of a damaged file can lead around in a circle, for ever where each frame is
                # worked on for long.
                if last is not None and frame.step <= last:
                    raise StoreError("A stored histogram is damaged (its step is no later one).")
                last = frame.step
                yield frame

    def events(self, run_id: str) -> list[records.Event]:
        """What a watched run reported, in order."""
        return rows.select(self._all, records.Event, "ORDER BY seq", run_id)

    def shadows(
        self, run_id: str, role: records.Role | None = None, step: int | None = None
    ) -> list[records.ShadowRecord]:
        """Half precision against the fp32 shadow, at its steps or at one of them."""
        at_step = "AND step=?3" if step is not None else ""
        rest = f"{at_step} AND (?2 IS NULL OR role=?2) ORDER BY step,module"
        values = (role,) if step is None else (role, step)
        return rows.select(self._all, records.ShadowRecord, rest, run_id, *values)

    def observations(self, run_id: str) -> list[Observation]:
        """Observations of a script, in order; empty for a probe."""
        sql = "SELECT kind,data FROM observation WHERE run=? ORDER BY seq"
        return [decode_observation(kind, data) for kind, data in self._all(sql, run_id)]

    def results(self, run_id: str) -> list[records.Result]:
        """What a measurement found, in order."""
        sql = "SELECT kind,data FROM result WHERE run=? ORDER BY seq"
        return [codec.decode_result(kind, data) for kind, data in self._all(sql, run_id)]

    def held(self, run_id: str) -> tuple[str, ...]:
        """Which of modules, frames of histograms and samples of devices there are of a run, by the
        names of their tables."""
        tables = ("module", "frame", "telemetry")
        first = "SELECT 1 FROM {} WHERE run=? LIMIT 1"
        return tuple(t for t in tables if self._all(first.format(t), run_id))

    def samples(self, run_id: str, points: int = 0) -> list[records.Sample]:
        """What devices read beside a run, in the order of time; with ``points`` about so many of
        each device, all extremes among them and none invented."""
        sql = f"{rows.selected(records.Sample)} WHERE run=? ORDER BY at,device"
        found = samples.of_devices(self._all(sql, run_id), points)
        return [rows.record(records.Sample, row) for row in found]

    def nonfinite(self, run_id: str, step: int | None = None) -> list[records.NonFiniteRecord]:
        """Parameters with NaN or Inf gradients, in backward order."""
        rest = 'AND (?2 IS NULL OR step=?2) ORDER BY step,"order"'
        return rows.select(self._all, records.NonFiniteRecord, rest, run_id, step)

    def is_next(self, run_id: str) -> bool:
        """Whether no other run waits in front of this one for the same device. A run that has not
        named its device yet (it is still starting) may want any."""
        return self.run(run_id).place <= 1

    def _all(self, sql: str, *values: object) -> Sequence[rows.Row]:
        with db.translated(self.path):
            return self._connection.execute(*db.in_order(sql, values)).fetchall()

    def _with_places(self, runs: list[records.RunInfo]) -> list[records.RunInfo]:
        """Fill in the place in the queue of every waiting run."""
        if not any(run.state is records.State.QUEUED for run in runs):
            return runs
        sql = f"SELECT {rows.RUN} FROM run WHERE state='queued' ORDER BY created, id"
        waiting = [i for i in map(rows.run_info, self._all(sql)) if i.state is records.State.QUEUED]
        places = {info.id: _place(info, waiting[:n]) for n, info in enumerate(waiting)}
        return [dataclasses.replace(run, place=places.get(run.id, 0)) for run in runs]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredVerdict:
    """What was concluded of a diagnosis, as a list of many shows it."""

    word: str  # fault, no_fault, inconclusive
    cause: str = ""  # id of the root cause; "" where there is none
    latent: str = ""  # id of the first latent loss
    could_not_run: bool = False


def _id(value: object) -> str:
    """Of a cause, which an untrusted conclusion may spell in any way; "" for none."""
    return codec.text(str(value)) if value is not None else ""


def _place(info: records.RunInfo, before: list[records.RunInfo]) -> int:
    """1 for the run that its device takes next."""
    return 1 + sum(_may_share_device(info, other) for other in before)


def _may_share_device(first: records.RunInfo, second: records.RunInfo) -> bool:
    devices = [run.machine.device for run in (first, second) if run.machine is not None]
    return len(devices) < 2 or devices[0] == devices[1]


def overview(
    query: Query, run_id: str, points: int, first: int | None, last: int | None
) -> list[records.StepRecord]:
    """See :meth:`Reader.overview`: the extremes, the changes and all bad steps, none of them
    invented. The pyramid of step blocks names the steps to show; only these are read. A run of
    1,000,000 steps costs what one of 10,000 does (benchmarks/results/store_rate.json)."""
    span = _span(query, run_id, first, last)
    if span is None:
        return []
    within = "AND step BETWEEN ? AND ? ORDER BY step LIMIT ?"
    few = f"SELECT count(*) FROM (SELECT 1 FROM step WHERE run=? {within})"
    if query(few, run_id, *span, points + 1)[0][0] <= points:
        return rows.select(query, records.StepRecord, within, run_id, *span, points)
    listed = "AND step IN (SELECT value FROM json_each(?)) ORDER BY step"
    chosen = json.dumps(sorted(_chosen(query, run_id, span, points)))
    return rows.select(query, records.StepRecord, listed, run_id, chosen)


def _chosen(query: Query, run_id: str, span: Range, points: int) -> set[int]:
    first, last = span
    blocks = cover_evenly(query, run_id, first, last, max(points // 2, 1))
    whole = combined(blocks)
    steps = {whole.first_step, whole.last_step}
    for block in blocks:
        if block.low_step is None or block.high_step is None:
            steps |= {block.first_step, block.last_step}  # no finite loss to choose by
        else:
            steps |= {block.low_step, block.high_step}
    return steps | _bad(query, run_id, blocks, points) | _changes(query, run_id, blocks, points)


def _bad(query: Query, run_id: str, blocks: list[StepBlock], points: int) -> set[int]:
    """All bad steps; where they are too many, the ends of each episode; where these are too many
    as well, the first and last of each block."""
    whole = combined(blocks)
    span = whole.first_step, whole.last_step
    if whole.bad <= points // 2:
        sql = f"SELECT step FROM step INDEXED BY step_bad WHERE run=? AND {BAD}"
        return {row[0] for row in query(f"{sql} AND step BETWEEN ? AND ?", run_id, *span)}
    steps = {step for b in blocks for step in (b.first_bad, b.last_bad) if step is not None}
    if whole.bad_ends <= points // 2:
        steps |= _marked(query, run_id, "bad", span)
    return steps


def _changes(query: Query, run_id: str, blocks: list[StepBlock], points: int) -> set[int]:
    """Steps whose scale differs from the step before; where they are too many, none but the
    blocks' own: a scale that changes every few steps is seen at those."""
    whole = combined(blocks)
    if whole.scale_changes > points // 2:
        return {b.first_step for b in blocks}
    return _marked(query, run_id, "scale", (whole.first_step, whole.last_step))


def _marked(query: Query, run_id: str, kind: str, span: Range) -> set[int]:
    sql = "SELECT step FROM step_mark WHERE run=? AND kind=? AND step BETWEEN ? AND ?"
    return {row[0] for row in query(sql, run_id, kind, *span)}


def totals(query: Query, run_id: str) -> records.StepTotals:
    """See Reader.step_totals."""
    block = _whole(query, run_id)
    if block is None:
        return records.StepTotals()
    return records.StepTotals(
        steps=block.steps,
        skipped=block.skipped,
        nonfinite_losses=block.bad_losses,
        nonfinite_norms=block.bad_norms,
        bad=block.bad,
        scale_changes=block.scale_changes,
        first_step=block.first_step,
        last_step=block.last_step,
        first_bad=block.first_bad,
        last_bad=block.last_bad,
        last_scale=codec.real(block.last_scale),
    )


def overhead_share(query: Query, run_id: str) -> float | None:
    """The instruments' share of the time of all steps but step 0; None where none was measured."""
    block = _whole(query, run_id)
    total_s = 0.0 if block is None else block.overhead_s + block.step_time_s
    return None if block is None or not total_s else block.overhead_s / total_s


def _whole(query: Query, run_id: str) -> StepBlock | None:
    span = _span(query, run_id, None, None)
    if span is None:
        return None
    size = SIZES[TOP]  # whole blocks of the top level: nothing is recorded beyond the ends
    blocks = cover(query, run_id, span[0] // size * size, (span[1] // size + 1) * size - 1)
    return combined(blocks) if blocks else None


def _span(query: Query, run_id: str, first: int | None, last: int | None) -> Range | None:
    """The recorded steps within first and last; None where there are none."""
    # Two statements: SQLite finds one end of an index at once, and scans for both together.
    ends = [
        query(f"SELECT {end}(step) FROM step WHERE run=?", run_id)[0][0] for end in ("min", "max")
    ]
    if ends[0] is None:
        return None
    if any(type(end) is not int for end in ends):  # an index that is not that of its table
        raise StoreError(
            f"What is stored of run {run_id} is damaged (its steps are not whole numbers)."
        )
    low = ends[0] if first is None else max(first, ends[0])
    high = ends[1] if last is None else min(last, ends[1])
    return (low, high) if low <= high else None
