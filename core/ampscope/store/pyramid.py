"""The tree of step blocks: what makes an overview of a million steps cost what it shows.

Level 0 sums up 16 consecutive step numbers, each level above it four blocks of the one below
(16, 64, … 262,144). The writer computes the touched blocks again from their steps at every flush,
so steps may come out of order or be written again, and a flush costs the same early and late.
"""

from __future__ import annotations

import dataclasses
import operator
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ampscope.store.step_blocks import COLUMNS, Block, Marks, Value, combined, marks, of_steps

SIZES = tuple(16 * 4**level for level in range(8))
TOP = len(SIZES) - 1
# As in the index step_bad, word for word: SQLite uses a partial index for its own condition alone.
BAD = "(skipped OR loss IN ('nan', 9e999, -9e999) OR grad_norm IN ('nan', 9e999, -9e999))"
Query = Callable[..., Sequence[Any]]  # (statement, *values) -> rows

_NAMES = [field.name for field in dataclasses.fields(Block)]
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
        following = query(after, run_id, (number + 1) * SIZES[0])[0][0]
        if following is not None:
            touched.add(following // SIZES[0])
    for number in sorted(touched):
        _base(connection, query, run_id, number)
    for level in range(1, TOP + 1):
        touched = {number // 4 for number in touched}
        for number in touched:
            block = combined(_stored(query, run_id, level - 1, 4 * number, 4 * number + 3))
            connection.execute(_PUT, (run_id, level, number, *_values(block)))


def cover(query: Query, run_id: str, first: int, last: int, level: int = TOP) -> list[Block]:
    """Blocks of a level that together sum up exactly the steps from first to last; those at the
    ends are put together from lower levels."""
    if level < 0:
        rows = query(_STEPS, run_id, first, last)
        if not rows:
            return []
        return [of_steps(rows, _marks(query, run_id, rows))]
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


def _ends(query: Query, run_id: str, first: int, last: int, level: int) -> list[Block]:
    return cover(query, run_id, first, last, level - 1) if first <= last else []


def _base(connection: sqlite3.Connection, query: Query, run_id: str, number: int) -> None:
    """Block ``number`` of level 0, and its marks."""
    first, last = number * SIZES[0], (number + 1) * SIZES[0] - 1
    rows = query(_STEPS, run_id, first, last)
    found = _marks(query, run_id, rows)
    connection.execute(
        "DELETE FROM step_mark WHERE run=? AND kind IN ('scale','bad') AND step BETWEEN ? AND ?",
        (run_id, first, last),
    )
    pairs = [("scale", step) for step in found.scale] + [("bad", step) for step in found.bad]
    connection.executemany(
        "INSERT INTO step_mark (run,kind,step) VALUES (?,?,?)", [(run_id, *pair) for pair in pairs]
    )
    connection.execute(_PUT, (run_id, 0, number, *_values(of_steps(rows, found))))


def _marks(query: Query, run_id: str, rows: Sequence[Any]) -> Marks:
    sql = "SELECT scale FROM step WHERE run=? AND step<? ORDER BY step DESC LIMIT 1"
    before: Sequence[tuple[Value]] = query(sql, run_id, rows[0][0])
    return marks(rows, before[0][0]) if before else marks(rows)


def _stored(query: Query, run_id: str, level: int, first: int, last: int) -> list[Block]:
    sql = (
        f"SELECT {_FIELDS} FROM step_block WHERE run=? AND level=? AND block BETWEEN ? AND ?"
        " ORDER BY block"
    )
    return [Block(*row) for row in query(sql, run_id, level, first, last)]
