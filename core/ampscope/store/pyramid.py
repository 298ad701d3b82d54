"""The tree of step blocks: what makes an overview of a million steps cost what it shows.

Level 0 sums up 16 consecutive step numbers, each level above it four blocks of the one below
(16, 64, … 262,144). The writer computes the touched blocks again from their steps at every flush,
so steps may come out of order or be written again, and a flush costs the same early and late.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, TypeVar

# Summary of a block of consecutive steps: exact counts, and the steps worth showing. Pure.
#
#     StepBlock(first_step=64, last_step=79, steps=16, skipped=1, bad=2, low_step=70, …)
#
# Blocks of neighbours combine into that of both, so a tree of them answers for any range of steps
# without reading the steps. A *bad* step was skipped, or its loss or gradient norm is not finite.


T = TypeVar("T")
Value = float | str | None  # as SQLite holds it: 'nan' is text
StepRow = tuple[int, Value, Value, int, Value, Value, Value]  # of COLUMNS
COLUMNS = "step,loss,scale,skipped,grad_norm,overhead_s,step_time_s"
_NO_SCALE = "none yet"


@dataclass(frozen=True, slots=True)
class StepBlock:
    """The fields are the columns of the table ``step_block``."""

    first_step: int
    last_step: int
    steps: int
    skipped: int
    bad_losses: int
    bad_norms: int
    bad: int
    bad_ends: int  # firsts and lasts of episodes of bad steps
    scale_changes: int
    low_step: int | None  # of the smallest finite loss; the earliest where several have it
    low_loss: float | None
    high_step: int | None
    high_loss: float | None
    first_bad: int | None
    last_bad: int | None
    last_scale: Value
    overhead_s: float  # of all steps but step 0, which warms caches up
    step_time_s: float


@dataclass(frozen=True, slots=True)
class Marks:
    """Steps of a block that an overview must not lose."""

    scale: list[int]  # the scale differs from that of the step before
    bad: list[int]  # first and last of each episode of consecutive bad steps within the block


def is_finite(value: Value) -> bool:
    """None was not recorded, which is not bad."""
    return value is None or (not isinstance(value, str) and math.isfinite(value))


def marks(rows: Sequence[StepRow], scale_before: Value = _NO_SCALE) -> Marks:
    """``scale_before`` is that of the step before the first row, where there is one."""
    scale: list[int] = []
    bad: list[int] = []
    before = rows[0][2] if scale_before == _NO_SCALE else scale_before
    flags = [_is_bad(row) for row in rows]
    for at, row in enumerate(rows):
        if row[2] != before:
            scale.append(row[0])
        before = row[2]
        is_inner = 0 < at < len(rows) - 1 and flags[at - 1] and flags[at + 1]
        if flags[at] and not is_inner:
            bad.append(row[0])
    return Marks(scale, bad)


def of_steps(rows: Sequence[StepRow], marked: Marks) -> StepBlock:
    """Of at least one row, in the order of steps."""
    losses = [(row[1], row[0]) for row in rows if row[1] is not None and is_finite(row[1])]
    low = min(losses, default=(None, None))
    high = max(losses, key=lambda pair: (pair[0], -pair[1]), default=(None, None))
    bad = [row[0] for row in rows if _is_bad(row)]
    scales = [row[2] for row in rows if row[2] is not None]
    return StepBlock(
        first_step=rows[0][0],
        last_step=rows[-1][0],
        steps=len(rows),
        skipped=sum(1 for row in rows if row[3]),
        bad_losses=sum(1 for row in rows if not is_finite(row[1])),
        bad_norms=sum(1 for row in rows if not is_finite(row[4])),
        bad=len(bad),
        bad_ends=len(marked.bad),
        scale_changes=len(marked.scale),
        low_step=low[1],
        low_loss=low[0],  # type: ignore[arg-type]  # finite losses are numbers
        high_step=high[1],
        high_loss=high[0],  # type: ignore[arg-type]  # as above
        first_bad=bad[0] if bad else None,
        last_bad=bad[-1] if bad else None,
        last_scale=scales[-1] if scales else None,
        overhead_s=_total(row[5] for row in rows if row[0] != 0),
        step_time_s=_total(row[6] for row in rows if row[0] != 0),
    )


_SUMS = (  # fields of a block that add up
    "steps", "skipped", "bad_losses", "bad_norms", "bad", "bad_ends", "scale_changes",
    "overhead_s", "step_time_s",
)  # fmt: skip


def combined(blocks: Sequence[StepBlock]) -> StepBlock:
    """Of at least one block, in the order of steps."""
    low = min((b for b in blocks if b.low_loss is not None), key=_low, default=blocks[0])
    high = max((b for b in blocks if b.high_loss is not None), key=_high, default=blocks[0])
    return StepBlock(
        first_step=blocks[0].first_step,
        last_step=blocks[-1].last_step,
        **{name: sum(getattr(b, name) for b in blocks) for name in _SUMS},
        low_step=low.low_step,
        low_loss=low.low_loss,
        high_step=high.high_step,
        high_loss=high.high_loss,
        first_bad=next((b.first_bad for b in blocks if b.first_bad is not None), None),
        last_bad=next((b.last_bad for b in reversed(blocks) if b.last_bad is not None), None),
        last_scale=next((b.last_scale for b in reversed(blocks) if b.last_scale is not None), None),
    )


def _is_bad(row: StepRow) -> bool:
    return bool(row[3]) or not is_finite(row[1]) or not is_finite(row[4])


def _low(block: StepBlock) -> float:
    return math.inf if block.low_loss is None else block.low_loss


def _high(block: StepBlock) -> float:
    return -math.inf if block.high_loss is None else block.high_loss


def _total(values: Iterable[Value]) -> float:
    return sum(v for v in values if isinstance(v, int | float) and math.isfinite(v))


SIZES = tuple(16 * 4**level for level in range(8))
TOP = len(SIZES) - 1
AT_ONCE = 256  # blocks of level 0 that are computed from one query
# As in the index step_bad, word for word: SQLite uses a partial index for its own condition alone.
BAD = "(skipped OR loss IN ('nan', 9e999, -9e999) OR grad_norm IN ('nan', 9e999, -9e999))"
Query = Callable[..., Sequence[Any]]  # (statement, *values) -> rows

_NAMES = [field.name for field in dataclasses.fields(StepBlock)]
_FIELDS = ",".join(_NAMES)
_values = operator.attrgetter(*_NAMES)
_STEPS = f"SELECT {COLUMNS} FROM step WHERE run=? AND step BETWEEN ? AND ? ORDER BY step"
_PUT = (
    f"INSERT OR REPLACE INTO step_block (run,level,block,{_FIELDS})"
    f" VALUES (?,?,?{',?' * len(_NAMES)})"
)


def update(connection: sqlite3.Connection, run_id: str, steps: Iterable[int]) -> None:
    """Compute every block anew that holds one of these steps, in the open transaction."""

    def query(sql: str, *values: object) -> Sequence[Any]:
        return connection.execute(sql, values).fetchall()

    touched = {step // SIZES[0] for step in steps}
    after = "SELECT min(step) FROM step WHERE run=? AND step>=?"
    for number in sorted(touched):  # whether the step after a block changes the scale depends on it
        if number + 1 in touched:
            continue
        following = query(after, run_id, (number + 1) * SIZES[0])[0][0]
        if following is not None:
            touched.add(following // SIZES[0])
    for first, last in _stretches(touched):
        _base(connection, query, run_id, first, last)
    for level in range(1, TOP + 1):
        touched = {number // 4 for number in touched}
        for number in touched:
            block = combined(_stored(query, run_id, level - 1, 4 * number, 4 * number + 3))
            connection.execute(_PUT, (run_id, level, number, *_values(block)))


def cover(query: Query, run_id: str, first: int, last: int, level: int = TOP) -> list[StepBlock]:
    """Blocks of a level that together sum up exactly the steps from first to last; those at the
    ends are put together from lower levels."""
    if level < 0:
        rows = query(_STEPS, run_id, first, last)
        if not rows:
            return []
        return [of_steps(rows, marks(rows, _scale_before(query, run_id, rows)))]
    size = SIZES[level]
    low, high = -(-first // size), (last + 1) // size  # whole blocks: low … high - 1
    if low > high:  # within one block
        parts = cover(query, run_id, first, last, level - 1)
        return [combined(parts)] if parts else []
    before = _ends(query, run_id, first, low * size - 1, level)
    after = _ends(query, run_id, high * size, last, level)
    return [
        *([combined(before)] if before else []),
        *_stored(query, run_id, level, low, high - 1),
        *([combined(after)] if after else []),
    ]


def cover_evenly(query: Query, run_id: str, first: int, last: int, wanted: int) -> list[StepBlock]:
    """About ``wanted`` blocks of nearly the same length that together sum up exactly the steps
    from first to last: what is shown of a run must not depend on where its length lies between two
    sizes of the tree."""
    enough = (n for n in range(TOP, -1, -1) if (last - first) // SIZES[n] >= wanted)
    if (level := next(enough, None)) is not None:
        blocks = cover(query, run_id, first, last, level)
        return [combined(part) for part in _parts(blocks, wanted)]
    rows = query(_STEPS, run_id, first, last)
    marked = marks(rows, _scale_before(query, run_id, rows)) if rows else Marks([], [])
    scale, bad = set(marked.scale), set(marked.bad)
    return [
        of_steps(
            part, Marks([r[0] for r in part if r[0] in scale], [r[0] for r in part if r[0] in bad])
        )
        for part in _parts(rows, wanted)
    ]


def _parts(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """As many as asked for, nearly equal; fewer of fewer items."""
    count = min(count, len(items))
    ends = [n * len(items) // count for n in range(count + 1)] if count else []
    return [items[a:b] for a, b in pairwise(ends)]


def _ends(query: Query, run_id: str, first: int, last: int, level: int) -> list[StepBlock]:
    return cover(query, run_id, first, last, level - 1) if first <= last else []


def _stretches(numbers: set[int]) -> Iterator[tuple[int, int]]:
    """First and last of consecutive ones, at most :data:`AT_ONCE` together."""
    first = last = None
    for number in sorted(numbers):
        if first is None or last is None:
            first = number
        elif number != last + 1 or number - first == AT_ONCE:
            yield first, last
            first = number
        last = number
    if first is not None and last is not None:
        yield first, last


def _base(connection: sqlite3.Connection, query: Query, run_id: str, first: int, last: int) -> None:
    """Blocks ``first`` to ``last`` of level 0, each of which has steps, and their marks."""
    low, high = first * SIZES[0], (last + 1) * SIZES[0] - 1
    steps = query(_STEPS, run_id, low, high)
    scale_before = _scale_before(query, run_id, steps)
    pairs: list[tuple[str, str, int]] = []
    blocks: list[tuple[object, ...]] = []
    for number, of_block in groupby(steps, lambda row: row[0] // SIZES[0]):
        rows = list(of_block)
        found = marks(rows, scale_before)
        scale_before = rows[-1][2]
        pairs += [(run_id, "scale", step) for step in found.scale]
        pairs += [(run_id, "bad", step) for step in found.bad]
        blocks.append((run_id, 0, number, *_values(of_steps(rows, found))))
    connection.execute(
        "DELETE FROM step_mark WHERE run=? AND kind IN ('scale','bad') AND step BETWEEN ? AND ?",
        (run_id, low, high),
    )
    connection.executemany("INSERT INTO step_mark (run,kind,step) VALUES (?,?,?)", pairs)
    connection.executemany(_PUT, blocks)


def _scale_before(query: Query, run_id: str, rows: Sequence[Any]) -> Value:
    """The loss scale of the last step before these rows."""
    sql = "SELECT scale FROM step WHERE run=? AND step<? ORDER BY step DESC LIMIT 1"
    before: Sequence[tuple[Value]] = query(sql, run_id, rows[0][0])
    return before[0][0] if before else _NO_SCALE


def _stored(query: Query, run_id: str, level: int, first: int, last: int) -> list[StepBlock]:
    sql = (
        f"SELECT {_FIELDS} FROM step_block WHERE run=? AND level=? AND block BETWEEN ? AND ?"
        " ORDER BY block"
    )
    return [StepBlock(*row) for row in query(sql, run_id, level, first, last)]
