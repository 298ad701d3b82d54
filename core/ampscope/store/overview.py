"""Few of very many steps, none of them invented: the extremes, the changes and all bad ones.

The pyramid of step blocks names the steps to show; only these are read. A run of 1,000,000 steps
costs what one of 10,000 does (benchmarks/results/store_rate.json).
"""

from __future__ import annotations

import json

from ampscope.errors import StoreError
from ampscope.records import StepRecord, StepTotals
from ampscope.store import door, rows
from ampscope.store.pyramid import BAD, SIZES, TOP, Query, cover
from ampscope.store.step_blocks import Block, combined

Range = tuple[int, int]


def overview(
    query: Query, run_id: str, points: int, first: int | None, last: int | None
) -> list[StepRecord]:
    """See Reader.overview."""
    span = _span(query, run_id, first, last)
    if span is None:
        return []
    where = "run=? AND step BETWEEN ? AND ? ORDER BY step LIMIT ?"
    few = f"SELECT count(*) FROM (SELECT 1 FROM step WHERE {where})"
    if query(few, run_id, *span, points + 1)[0][0] <= points:
        found = query(f"SELECT {rows.STEP} FROM step WHERE {where}", run_id, *span, points)
        return [rows.step(row) for row in found]
    sql = (
        f"SELECT {rows.STEP} FROM step WHERE run=? AND step IN (SELECT value FROM json_each(?))"
        " ORDER BY step"
    )
    chosen = sorted(_chosen(query, run_id, span, points))
    return [rows.step(row) for row in query(sql, run_id, json.dumps(chosen))]


def totals(query: Query, run_id: str) -> StepTotals:
    """See Reader.step_totals."""
    block = _whole(query, run_id)
    if block is None:
        return StepTotals()
    return StepTotals(
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
        last_scale=door.real(block.last_scale),
    )


def overhead_share(query: Query, run_id: str) -> float | None:
    """The instruments' share of the time of all steps but step 0; None where none was measured."""
    block = _whole(query, run_id)
    total_s = 0.0 if block is None else block.overhead_s + block.step_time_s
    return None if block is None or not total_s else block.overhead_s / total_s


def _whole(query: Query, run_id: str) -> Block | None:
    span = _span(query, run_id, None, None)
    blocks = [] if span is None else cover(query, run_id, *_rounded(span))
    return combined(blocks) if blocks else None


def _rounded(span: Range) -> Range:
    """To whole blocks of the top level: nothing is recorded beyond the ends."""
    size = SIZES[TOP]
    return span[0] // size * size, (span[1] // size + 1) * size - 1


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


def _chosen(query: Query, run_id: str, span: Range, points: int) -> set[int]:
    first, last = span
    blocks_wanted = max(points // 2, 1)
    level = next((n for n, size in enumerate(SIZES) if (last - first) // size < blocks_wanted), TOP)
    blocks = cover(query, run_id, first, last, level)
    whole = combined(blocks)
    steps = {whole.first_step, whole.last_step}
    for block in blocks:
        if block.low_step is None or block.high_step is None:
            steps |= {block.first_step, block.last_step}  # no finite loss to tell steps apart by
        else:
            steps |= {block.low_step, block.high_step}
    return steps | _bad(query, run_id, blocks, points) | _changes(query, run_id, blocks, points)


def _bad(query: Query, run_id: str, blocks: list[Block], points: int) -> set[int]:
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


def _changes(query: Query, run_id: str, blocks: list[Block], points: int) -> set[int]:
    """Steps whose scale differs from the step before; where they are too many, none but the
    blocks' own: a scale that changes every few steps is seen at those."""
    whole = combined(blocks)
    if whole.scale_changes > points // 2:
        return {b.first_step for b in blocks}
    return _marked(query, run_id, "scale", (whole.first_step, whole.last_step))


def _marked(query: Query, run_id: str, kind: str, span: Range) -> set[int]:
    sql = "SELECT step FROM step_mark WHERE run=? AND kind=? AND step BETWEEN ? AND ?"
    return {row[0] for row in query(sql, run_id, kind, *span)}
