"""Summary of a block of consecutive steps: exact counts, and the steps worth showing. Pure.

    Block(first_step=64, last_step=79, steps=16, skipped=1, bad=2, low_step=70, low_loss=1.2, …)

Blocks of neighbours combine into that of both, so a tree of them answers for any range of steps
without reading the steps. A *bad* step was skipped, or its loss or gradient norm is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Value = float | str | None  # as SQLite holds it: 'nan' is text
StepRow = tuple[int, Value, Value, int, Value, Value, Value]  # of COLUMNS
COLUMNS = "step,loss,scale,skipped,grad_norm,overhead_s,step_time_s"
_NO_SCALE = "none yet"


@dataclass(frozen=True, slots=True)
class Block:
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


def of_steps(rows: Sequence[StepRow], marked: Marks) -> Block:
    """Of at least one row, in the order of steps."""
    losses = [(row[1], row[0]) for row in rows if row[1] is not None and is_finite(row[1])]
    low = min(losses, default=(None, None))
    high = max(losses, key=lambda pair: (pair[0], -pair[1]), default=(None, None))
    bad = [row[0] for row in rows if _is_bad(row)]
    scales = [row[2] for row in rows if row[2] is not None]
    return Block(
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


def combined(blocks: Sequence[Block]) -> Block:
    """Of at least one block, in the order of steps."""
    low = min((b for b in blocks if b.low_loss is not None), key=_low, default=blocks[0])
    high = max((b for b in blocks if b.high_loss is not None), key=_high, default=blocks[0])
    return Block(
        first_step=blocks[0].first_step,
        last_step=blocks[-1].last_step,
        steps=sum(b.steps for b in blocks),
        skipped=sum(b.skipped for b in blocks),
        bad_losses=sum(b.bad_losses for b in blocks),
        bad_norms=sum(b.bad_norms for b in blocks),
        bad=sum(b.bad for b in blocks),
        bad_ends=sum(b.bad_ends for b in blocks),
        scale_changes=sum(b.scale_changes for b in blocks),
        low_step=low.low_step,
        low_loss=low.low_loss,
        high_step=high.high_step,
        high_loss=high.high_loss,
        first_bad=next((b.first_bad for b in blocks if b.first_bad is not None), None),
        last_bad=next((b.last_bad for b in reversed(blocks) if b.last_bad is not None), None),
        last_scale=next((b.last_scale for b in reversed(blocks) if b.last_scale is not None), None),
        overhead_s=sum(b.overhead_s for b in blocks),
        step_time_s=sum(b.step_time_s for b in blocks),
    )


def _is_bad(row: StepRow) -> bool:
    return bool(row[3]) or not is_finite(row[1]) or not is_finite(row[4])


def _low(block: Block) -> float:
    return math.inf if block.low_loss is None else block.low_loss


def _high(block: Block) -> float:
    return -math.inf if block.high_loss is None else block.high_loss


def _total(values: Iterable[Value]) -> float:
    return sum(v for v in values if isinstance(v, int | float) and math.isfinite(v))
