"""Values that were not finite before any op of the script made them: they came in with a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.run_view import RunView


@dataclass(frozen=True, slots=True, order=True)
class ForeignValue:
    """First sight of one kind of non-finite value at one place; NaN sorts before infinity."""

    is_infinite: bool  # infinities only, as a mask has them
    step: int
    name: str
    line: str
    count: int
    index: tuple[int, ...] = ()  # of the first one; the first number is the sample's


def foreign_values(run: RunView) -> list[ForeignValue]:
    """One a place and kind, the first sight of each.

    A batch with the same trouble again is left out: it did no harm before, as a mask of minus
    infinities that comes with every batch does none.
    """
    seen = [
        ForeignValue(not s.nan, s.attempt, s.name, "", s.nan + s.inf, s.index)
        for s in run.scans
        if s.moment == "batch" and s.nan + s.inf
    ]
    seen += [
        ForeignValue(False, u.attempt, f"an operand of {u.op}", u.line, u.count)
        for u in run.uses
        if u.name == "nan_operand"
    ]
    first: dict[tuple[bool, str, str], ForeignValue] = {}
    for value in sorted(seen, key=lambda v: v.step):
        first.setdefault((value.is_infinite, value.name, value.line), value)
    return list(first.values())
