"""How a recorded training stands: its steps in few points, exact totals, what it reported, and
whether it is well.

A step is *bad now* when the run ends in steps that are not finite and a loss scaler does not
explain them: GradScaler skips a few steps as a matter of course while it looks for a scale.

What the loss scaler did over a run is summed up here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from ampscope.records import Event, RunInfo, StepRecord, StepTotals

MANY_SKIPS = 3  # in a row: the watcher keeps a capsule from here on, calibration is over by then


@dataclass(frozen=True, slots=True)
class Training:
    """One run (one rank of a training)."""

    run: RunInfo
    steps: list[StepRecord]
    totals: StepTotals
    events: list[Event]
    bad_since: int | None  # first step of the bad steps that the run ends in
    last_skip: int | None

    @property
    def last(self) -> StepRecord | None:
        """The newest step."""
        return self.steps[-1] if self.steps else None

    def of(self, kind: str) -> list[Event]:
        """Events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]

    @property
    def loss(self) -> FiniteParts:
        """Losses of the shown steps."""
        return finite_parts([s.step for s in self.steps], [s.loss for s in self.steps])

    @property
    def norm(self) -> FiniteParts:
        """Gradient norms of the shown steps."""
        return finite_parts([s.step for s in self.steps], [s.grad_norm for s in self.steps])


def training_of(
    run: RunInfo, steps: list[StepRecord], totals: StepTotals, events: list[Event]
) -> Training:
    """What ``steps`` (real ones that stand for all), totals and events amount to."""
    skips = [s.step for s in steps if s.skipped]
    return Training(run, steps, totals, events, bad_since(steps), skips[-1] if skips else None)


def bad_since(steps: Sequence[StepRecord]) -> int | None:
    """The first of the bad steps that ``steps`` end in; None where they end well, or in a few
    skips."""
    streak: list[StepRecord] = []
    for step in reversed(steps):
        if not is_bad(step):
            break
        streak.append(step)
    if not streak or (all(is_calm_skip(s) for s in streak) and len(streak) < MANY_SKIPS):
        return None
    return streak[-1].step


def is_bad(step: StepRecord) -> bool:
    """Skipped, or its loss or gradient norm is not finite."""
    return step.skipped or not all(_is_finite(v) for v in (step.loss, step.grad_norm))


def is_calm_skip(step: StepRecord) -> bool:
    """Skipped with a finite loss: what a scaler does now and then."""
    return step.skipped and _is_finite(step.loss)


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


# What the loss scaler did over a run: its skips, its growths, and what they amount to.
#
# GradScaler starts high, halves the scale at every step whose gradients are not finite (that step
# is skipped), and doubles it after `growth_interval` good ones. So a healthy run starts with a
# short *search* and then hardly ever skips; a skip right after a growth is the scaler testing the
# ceiling.


# A skip counts as part of the search while every step before it, but for this many, was skipped
# too: a first finite step between two skips is common when batches differ.
SEARCH_GAP_STEPS = 2
# So many good steps after the last skip make "then none" a statement; fewer only make it "so far".
SETTLED_STEPS = 10
# The scale is called steady when this share of the last steps ran at one value.
STEADY_SHARE = 0.25


class Pattern(StrEnum):
    """How the skips of a run lie."""

    NO_SCALER = "no_scaler"
    NONE = "none"
    SEARCH = "search"  # all at the start
    AFTER_GROWTH = "after_growth"  # those after the search each follow a growth
    RECURRING = "recurring"
    NEVER_ENDING = "never_ending"  # every step from some step on


@dataclass(frozen=True, slots=True)
class ScaleSummary:
    """Skips and scale of a run. Steps are numbers as recorded; scales are what steps used."""

    pattern: Pattern
    step_count: int
    skips: tuple[int, ...]
    search_skips: int
    search_steps: int  # length of the search: up to and including its last skip
    growths: tuple[int, ...]  # steps that used a larger scale than the step before
    first_scale: float | None
    last_scale: float | None
    is_steady: bool
    good_since: int  # finite steps after the last skip


@dataclass(frozen=True, slots=True)
class FiniteParts:
    """A series split so that no point is lost: finite points to draw, the others by kind."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    nan_steps: tuple[int, ...]
    pos_inf_steps: tuple[int, ...]
    neg_inf_steps: tuple[int, ...]

    @property
    def nonfinite_count(self) -> int:
        """Points that cannot be drawn: NaN and both infinities."""
        return len(self.nan_steps) + len(self.pos_inf_steps) + len(self.neg_inf_steps)


def summarize(steps: Sequence[StepRecord]) -> ScaleSummary:
    """Summary of steps in order."""
    scaled = [s for s in steps if s.scale is not None]
    skips = tuple(s.step for s in steps if s.skipped)
    search = _search_length(steps)
    last_skip = max((i for i, s in enumerate(steps) if s.skipped), default=-1)
    growths = growth_steps(scaled)
    return ScaleSummary(
        pattern=_pattern(steps, search, growths) if scaled else Pattern.NO_SCALER,
        step_count=len(steps),
        skips=skips,
        search_skips=sum(s.skipped for s in steps[:search]),
        search_steps=search,
        growths=growths,
        first_scale=scaled[0].scale if scaled else None,
        last_scale=scaled[-1].scale if scaled else None,
        is_steady=_is_steady(scaled),
        good_since=len(steps) - 1 - last_skip,
    )


def growth_steps(steps: Sequence[StepRecord]) -> tuple[int, ...]:
    """Steps that used a larger scale than the recorded step before them."""
    return tuple(
        b.step
        for a, b in pairwise(steps)
        if a.scale is not None and b.scale is not None and b.scale > a.scale
    )


def finite_parts(steps: Sequence[int], values: Sequence[float | None]) -> FiniteParts:
    """Split a series; None (not recorded) is left out, NaN and infinities are not."""
    known = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None]
    finite = [(s, v) for s, v in known if math.isfinite(v)]
    return FiniteParts(
        steps=tuple(s for s, _ in finite),
        values=tuple(v for _, v in finite),
        nan_steps=tuple(s for s, v in known if math.isnan(v)),
        pos_inf_steps=tuple(s for s, v in known if v == math.inf),
        neg_inf_steps=tuple(s for s, v in known if v == -math.inf),
    )


def _search_length(steps: Sequence[StepRecord]) -> int:
    """Number of steps from the start that belong to the search for a scale."""
    length = good = 0
    for i, step in enumerate(steps):
        good = 0 if step.skipped else good + 1
        if good > SEARCH_GAP_STEPS:
            break
        if step.skipped:
            length = i + 1
    return length


def _pattern(steps: Sequence[StepRecord], search: int, growths: tuple[int, ...]) -> Pattern:
    if not any(s.skipped for s in steps):
        return Pattern.NONE
    later = [s.step for s in steps[search:] if s.skipped]
    if steps[-1].skipped and _trailing_skips(steps) >= SETTLED_STEPS:
        return Pattern.NEVER_ENDING
    if not later:
        return Pattern.SEARCH
    return Pattern.AFTER_GROWTH if set(later) <= set(growths) else Pattern.RECURRING


def _trailing_skips(steps: Sequence[StepRecord]) -> int:
    return next((i for i, s in enumerate(reversed(steps)) if not s.skipped), len(steps))


def _is_steady(scaled: Sequence[StepRecord]) -> bool:
    if not scaled:
        return False
    tail = scaled[-max(1, math.ceil(STEADY_SHARE * len(scaled))) :]
    return len({s.scale for s in tail}) == 1 and not tail[-1].skipped
