"""How a recorded training stands: its steps in few points, exact totals, what it reported, and
whether it is well.

A step is *bad now* when the run ends in steps that are not finite and a loss scaler does not
explain them: GradScaler skips a few steps as a matter of course while it looks for a scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
