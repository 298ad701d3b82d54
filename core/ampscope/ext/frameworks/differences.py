"""The same network in several frameworks: where its histograms differ, and what that goes back to.

Runs that begin with the same weights and the same batch are compared layer by layer. Gradients are
compared after their loss scale was taken out, so that 2^16 against 2^15 is no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ampscope.analysis.distribution import aligned, merged, scale_exponent
from ampscope.numerics.histogram import NAN, NEG_INF, NEG_ZERO, POS_ZERO, Raw
from ampscope.records import Frame

LOWEST, HIGHEST = -220, 200  # wide enough for any fp32 number divided by any loss scale in use
SAME = 0.01  # of the elements: rounding alone moves fewer into another power of two


@dataclass(frozen=True, slots=True)
class LayerSeen:
    """One layer in one framework."""

    counts: Raw  # by exponent from LOWEST to HIGHEST, then zeros, then what is not finite
    dtype: str

    @property
    def total(self) -> int:
        """Elements."""
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """One layer in two frameworks."""

    path: str
    first: LayerSeen
    second: LayerSeen
    moved: float  # share of the elements that lie in another bin
    why: str


def layers(frame: Frame, paths: Mapping[int, str]) -> dict[str, LayerSeen]:
    """Each layer of a frame by its path, unscaled."""
    whole = merged(frame)
    shift = -(scale_exponent(frame.scale) or 0) if frame.role.is_gradient else 0
    finite = aligned(whole.rows, [shift] * len(whole.modules), LOWEST, HIGHEST)
    zeros = whole.rows[:, [POS_ZERO, NEG_ZERO]].sum(axis=1, keepdims=True)
    bad = whole.rows[:, NAN : NEG_INF + 1].sum(axis=1, keepdims=True)
    counts = np.hstack([finite, zeros, bad])
    return {
        paths[module]: LayerSeen(counts[i], whole.dtypes[i])
        for i, module in enumerate(whole.modules)
        if paths.get(module)
    }


def differences(
    first: Mapping[str, LayerSeen],
    second: Mapping[str, LayerSeen],
    names: tuple[str, str] = ("the first", "the second"),
) -> list[LayerDifference]:
    """Layers that both have, in the first's order; ``names`` are the frameworks'."""
    return [
        _difference(path, seen, second[path], names)
        for path, seen in first.items()
        if path in second and seen.total and second[path].total
    ]


def _difference(
    path: str, first: LayerSeen, second: LayerSeen, names: tuple[str, str]
) -> LayerDifference:
    one, other = (seen.counts / seen.total for seen in (first, second))
    moved = 0.5 * float(np.abs(one - other).sum())
    return LayerDifference(path, first, second, moved, _why(first, second, moved, names))


def _why(first: LayerSeen, second: LayerSeen, moved: float, names: tuple[str, str]) -> str:
    """The reason that the recorded facts give; a difference without one says so."""
    if first.total != second.total:
        return f"not the same tensor: {first.total:,} and {second.total:,} elements"
    if first.dtype != second.dtype:
        return f"{first.dtype} in {names[0]}, {second.dtype} in {names[1]}, by their own rules"
    if first.counts[-1] != second.counts[-1]:
        worse = names[int(first.counts[-1] < second.counts[-1])]
        return f"not finite in {worse}: look at the loss scale and at the sums"
    zeros = abs(int(first.counts[-2]) - int(second.counts[-2])) / first.total
    if moved <= SAME:
        return "the same but for rounding"
    if zeros > moved / 2:
        more = names[int(first.counts[-2] < second.counts[-2])]
        return f"more zeros in {more}: underflow, or a cast"
    return f"the same dtype ({first.dtype}): other sums or other roundings before it"
