"""Limits on what mixed precision may cost a training, and what a run of it really costs.

    [tool.ampscope.budget]
    lost_gradients = 0.01      # share of the gradients' elements that half precision made zero
    new_fp32_islands = 0       # matmuls and convolutions in fp32 that the base did not have
    step_time_ratio = 1.1      # step time against the base

Each is measured against something that was run: lost gradients against the fp32 control of the same
script, the others against the same script at a base (another commit).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ampscope.analysis.run_view import RunView
from ampscope.errors import BadInput
from ampscope.policy.autocast_lists import CUDA_LISTS

_HALF_OPS = CUDA_LISTS["lower_precision_fp"]  # autocast runs these in half
# What they are decomposed to before they are recorded.
_BELOW = frozenset({"convolution", "_convolution", "addmm", "mm", "bmm", "baddbmm", "addbmm"})


@dataclass(frozen=True, slots=True)
class Budgets:
    """The limits that are set; None where there is none."""

    lost_gradients: float | None = None
    new_fp32_islands: float | None = None
    step_time_ratio: float | None = None

    @property
    def need_base(self) -> tuple[str, ...]:
        """The names of those that are measured against a base."""
        asked = ("new_fp32_islands", "step_time_ratio")
        return tuple(name for name in asked if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True)
class Island:
    """A matmul or convolution in fp32, in a script that computes in half elsewhere."""

    line: str  # "train.py:41"
    code: str  # that line's text
    op: str


@dataclass(frozen=True, slots=True)
class BudgetOutcome:
    """One budget and what was measured: ``kept`` is None where nothing could be."""

    name: str
    limit: float
    value: float | None
    kept: bool | None
    sentence: str
    islands: tuple[Island, ...] = ()


def budgets_of(table: object, where: str) -> Budgets:
    """``[tool.ampscope.budget]``. Raises BadInput for an unknown name or a limit that is none."""
    if not isinstance(table, dict):
        raise BadInput(f"[tool.ampscope.budget] of {where} is not a table.")
    known = [field.name for field in fields(Budgets)]
    if unknown := sorted(set(table) - set(known)):
        raise BadInput(
            f"[tool.ampscope.budget] of {where} has no {unknown[0]!r}; it has {', '.join(known)}."
        )
    for name, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise BadInput(
                f"{name} in [tool.ampscope.budget] of {where} is not a number of 0 or more."
            )
    if not table:
        raise BadInput(f"{where} sets no budget in [tool.ampscope.budget].")
    return Budgets(**table)


def judge_lost(limit: float, run: RunView, fp32: RunView | None) -> BudgetOutcome:
    """The share of :func:`lost_gradients` against its limit."""
    counts = lost_gradients(run, fp32) if fp32 is not None else None
    if counts is None:
        return BudgetOutcome(
            "lost_gradients",
            limit,
            None,
            None,
            "No step has gradients in both the script's own precision and fp32.",
        )
    lost, alive = counts
    share = lost / alive
    return BudgetOutcome(
        "lost_gradients",
        limit,
        share,
        share <= limit,
        f"{lost:,} of {alive:,} gradient elements ({share:.2%}) are zero here and not in fp32; the "
        f"budget is {limit:.2%}.",
    )


def lost_gradients(run: RunView, fp32: RunView) -> tuple[int, int] | None:
    """Elements of the optimizers' gradients that are zero in the run and not in its fp32 control,
    and those that are not zero in the control, over the steps that both made; None without any.

    The count is of one step's elements together, so an element that became zero can hide one that
    rounding made non-zero: the share is a lower bound.
    """
    lost = alive = 0
    for own, other in zip(run.steps, fp32.steps, strict=False):
        if (own.optimizer, own.grad_total) != (other.optimizer, other.grad_total):
            break  # they no longer do the same
        lost += max(0, own.grad_zero - other.grad_zero)
        alive += other.grad_total - other.grad_zero
    return (lost, alive) if alive else None


def judge_islands(limit: float, head: RunView, base: RunView) -> BudgetOutcome:
    """The number of :func:`new_islands` against its limit."""
    found = new_islands(islands(head), islands(base))
    named = "; ".join(f"{island.op} at {island.line}" for island in found[:3])
    listed = f": {named}" + (" and more" if len(found) > 3 else "") if found else ""
    return BudgetOutcome(
        "new_fp32_islands",
        limit,
        len(found),
        len(found) <= limit,
        f"{len(found)} matmuls and convolutions run in fp32 that the base did not have{listed}; "
        f"the budget is {limit:g}.",
        found,
    )


def new_islands(head: Sequence[Island], base: Sequence[Island]) -> tuple[Island, ...]:
    """Those of ``head`` that ``base`` does not have. Lines move between commits, so they are
    compared by their text; and where the text changed, the number of them for each op must have
    grown too."""
    same = Counter((island.code, island.op) for island in base)
    unmatched = []
    for island in head:
        if same[island.code, island.op] > 0:
            same[island.code, island.op] -= 1
        else:
            unmatched.append(island)
    more = Counter(island.op for island in head)
    more.subtract(Counter(island.op for island in base))
    found = []
    for island in unmatched:
        if more[island.op] > 0:
            more[island.op] -= 1
            found.append(island)
    return tuple(found)


def islands(run: RunView) -> tuple[Island, ...]:
    """Forward matmuls and convolutions that took fp32 alone, once per line and op; none in a run
    that computes nothing in half."""
    if not any({"fp16", "bf16"} & set(use.takes) for use in run.line_uses):
        return ()
    texts = {source.file: source.lines for source in run.sources}
    found: dict[tuple[str, str], Island] = {}
    for use in run.line_uses:
        name = use.op.partition(".")[0]
        if use.backward or set(use.takes) != {"fp32"} or name not in _HALF_OPS | _BELOW:
            continue
        file, _, number = use.line.rpartition(":")
        lines = texts.get(file, ())
        at = int(number) if number.isdecimal() else 0
        code = lines[at - 1].strip() if 0 < at <= len(lines) else ""
        found.setdefault((use.line, name), Island(use.line, code, name))
    return tuple(found.values())


def judge_time(
    limit: float, head: Sequence[Sequence[float]], base: Sequence[Sequence[float]]
) -> BudgetOutcome:
    """Seconds of each step, by round; head and base ran interleaved. The budget is exceeded when it
    is so in every round: one slow round of a shared machine is no regression."""
    ratios = [
        statistics.median(own) / statistics.median(other)
        for own, other in zip(head, base, strict=False)
        if own and other
    ]
    if not ratios:
        return BudgetOutcome(
            "step_time_ratio",
            limit,
            None,
            None,
            "No round has a step time of both: they need at least three optimizer steps.",
        )
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    return BudgetOutcome(
        "step_time_ratio",
        limit,
        middle,
        low <= limit,
        f"A step takes {middle:.2f} times the base's (rounds: {low:.2f} to {high:.2f}); the budget "
        f"is {limit:g}, exceeded in {sum(r > limit for r in ratios)} of {len(ratios)} rounds.",
    )
