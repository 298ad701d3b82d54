"""What the loss scaler did over a run: its skips, its growths, and what they amount to.

GradScaler starts high, halves the scale at every step whose gradients are not finite (that step is
skipped), and doubles it after `growth_interval` good ones. So a healthy run starts with a short
*search* and then hardly ever skips; a skip right after a growth is the scaler testing the ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from ampscope.records import StepRecord

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


def growth_steps(steps: Sequence[StepRecord]) -> tuple[int, ...]:
    """Steps that used a larger scale than the recorded step before them."""
    return tuple(
        b.step
        for a, b in pairwise(steps)
        if a.scale is not None and b.scale is not None and b.scale > a.scale
    )


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
