"""Two runs beside each other: from which step they differ, and in which modules most.

Modules are the same where their paths are. A share of exact zeros can be compared whatever the
loss scales and dtypes of the two are: an element that is zero in one run alone was lost there, as
long as the weights of both are still the same. What underflowed is known of each run by itself,
where an fp32 shadow of the step was taken: zero in half, and in fp32 below the format's range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ampscope.analysis.op_precision import is_half, split
from ampscope.number_words import percent, plural
from ampscope.numerics.histogram import NAN, NEG_INF, NEG_ZERO, POS_ZERO
from ampscope.records import Frame, ModuleRecord, ShadowRecord, StepRecord

TIMES = 2.0  # from there on a factor reads better than a percentage


@dataclass(frozen=True, slots=True)
class Side:
    """What one of the runs holds of a module; None where it lacks the module or its values."""

    weights: str | None  # dtypes of its own parameters, "" where it has none
    values: str | None  # dtypes of the histograms' values
    zeros: float | None  # share of the elements, 0 to 1
    nonfinite: int | None  # elements
    # Share of the elements that underflowed; None where no shadow was taken of half precision.
    lost: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Pair:
    """One module of two runs."""

    path: str
    type: str
    first: Side
    second: Side

    @property
    def zeros_apart(self) -> float | None:
        """Share of zeros in the second run less that in the first."""
        if self.first.zeros is None or self.second.zeros is None:
            return None
        return self.second.zeros - self.first.zeros

    @property
    def lost_apart(self) -> float | None:
        """Share that underflowed in the second run less that in the first."""
        if self.first.lost is None or self.second.lost is None:
            return None
        return self.second.lost - self.first.lost

    @property
    def is_alike(self) -> bool:
        """Whether dtypes, zeros, what underflowed and what is not finite are equal, and both have
        the module."""
        return self.first == self.second and not self.lost_apart


@dataclass(frozen=True, slots=True)
class LossParting:
    """How two series of losses compare. Steps are those that both recorded."""

    steps: int
    first_different: int | None  # step at which the losses are not the same number
    at: int | None  # last step at which both are finite
    apart: float | None  # there: second less first, relative to the first
    first_nonfinite: tuple[int | None, int | None]  # of each run, over all of its steps


def parting(first: Sequence[StepRecord], second: Sequence[StepRecord]) -> LossParting:
    """From which step the losses of two runs differ, and by how much at the end."""
    ours, theirs = (
        {s.step: s.loss for s in steps if s.loss is not None} for steps in (first, second)
    )
    common = sorted(ours.keys() & theirs.keys())
    different = next((n for n in common if not _same(ours[n], theirs[n])), None)
    finite = [n for n in common if math.isfinite(ours[n]) and math.isfinite(theirs[n])]
    at = finite[-1] if finite else None
    apart = None
    if at is not None and ours[at]:
        apart = (theirs[at] - ours[at]) / abs(ours[at])
    bad = tuple(
        next((n for n, loss in sorted(losses.items()) if not math.isfinite(loss)), None)
        for losses in (ours, theirs)
    )
    return LossParting(len(common), different, at, apart, (bad[0], bad[1]))


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def parting_answer(names: tuple[str, str], found: LossParting) -> str:
    """From where two runs of these names differ, in a sentence."""
    if not found.steps:
        return "The two runs have no step in common whose loss both recorded."
    parts = [f"Both runs have the same loss at each of {plural(found.steps, 'common step')}"]
    if found.first_different is not None:
        parts = [f"The losses differ from step {found.first_different:,} on"]
        if found.apart:
            parts[0] += f"; at step {found.at:,} {_higher(names, found.apart)}"
    for name, step in zip(names, found.first_nonfinite, strict=True):
        if step is not None:
            parts.append(f"the loss of {name} is first not finite at step {step:,}")
    return "; ".join(parts) + "."


def _higher(names: tuple[str, str], apart: float) -> str:
    """Which loss is the higher one, and by how much; ``apart`` is second less first, relative to
    the first."""
    higher, lower = names[::-1] if apart > 0 else names
    if apart <= -1:
        return f"they are {percent(abs(apart))} of the first apart"
    ratio = 1 + apart if apart > 0 else 1 / (1 + apart)
    if ratio < TIMES:
        return f"{higher} is {percent(ratio - 1)} higher"
    return f"{higher} is {ratio:,.3g} times as high as {lower}"


def pairs(
    first: Sequence[ModuleRecord],
    second: Sequence[ModuleRecord],
    first_frame: Frame | None,
    second_frame: Frame | None,
    shadows: tuple[Sequence[ShadowRecord], Sequence[ShadowRecord]] = ((), ()),
) -> list[Pair]:
    """All modules of both runs, those that differ most first; frames of one role, with one row a
    module (:func:`ampscope.analysis.distribution.merged`), and each run's ``shadows`` of that role
    and step.

    The order: what is not finite in one run alone, the difference of what underflowed, that of
    zeros, modules of one run alone, another dtype, and the model's order.
    """
    ours = _sides(first, first_frame, shadows[0])
    theirs = _sides(second, second_frame, shadows[1])
    types = {m.path: m.type for m in (*second, *first)}
    absent = Side(None, None, None, None)
    found = [
        Pair(path, types[path], ours.get(path, absent), theirs.get(path, absent))
        for path in dict.fromkeys((*ours, *theirs))
    ]
    return sorted(found, key=_rank)


def _sides(
    modules: Sequence[ModuleRecord], frame: Frame | None, shadows: Sequence[ShadowRecord]
) -> dict[str, Side]:
    lost = {s.module: s for s in shadows}
    place = {} if frame is None else {module: i for i, module in enumerate(frame.modules)}
    found = {}
    for module in modules:
        if frame is None or module.index not in place:
            found[module.path] = Side(module.weight_dtypes, None, None, None)
            continue
        row = frame.rows[place[module.index]]
        total, zeros = int(row.sum()), int(row[POS_ZERO] + row[NEG_ZERO])
        found[module.path] = Side(
            module.weight_dtypes,
            frame.dtypes[place[module.index]],
            zeros / total if total else None,
            int(row[NAN : NEG_INF + 1].sum()),
            _lost(frame.dtypes[place[module.index]], lost.get(module.index)),
        )
    return found


def _lost(dtypes: str, shadow: ShadowRecord | None) -> float | None:
    if shadow is not None and shadow.total:
        return shadow.below_range / shadow.total
    return None if any(map(is_half, split(dtypes))) else 0.0  # a shadow computes in fp32 itself


def _rank(pair: Pair) -> tuple[bool, float, float, bool, bool]:
    one, other = pair.first, pair.second
    return (
        bool(one.nonfinite) == bool(other.nonfinite),
        -abs(pair.lost_apart or 0.0),
        -abs(pair.zeros_apart or 0.0),
        (one.weights is None) == (other.weights is None),
        (one.weights, one.values) == (other.weights, other.values),
    )
