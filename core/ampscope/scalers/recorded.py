"""A recorded run as the replay reads it: fates and counts of every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ampscope.exponents import ABOVE, EXPONENTS, Raw
from ampscope.formats import NumberFormat
from ampscope.observations import Call
from ampscope.records import Frame, RunSpec, StepRecord
from ampscope.scalers.overflow import StepGradients, narrow_counts, step_gradients
from ampscope.scalers.policies import POLICIES, Policy, Settings, allowed
from ampscope.scalers.replay import Replay, replay
from ampscope.scalers.turns import Turn, first_scales, turns_of


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """``counts`` is [steps, ABOVE + 1]: finite output gradients of each step at its own scale."""

    gradients: tuple[StepGradients, ...]
    counts: Raw
    narrow: NumberFormat
    turns: tuple[Turn, ...] = ()  # which steps share an update of which scaler

    @property
    def histograms(self) -> int:
        """Steps that have any."""
        return sum(g.has_histogram for g in self.gradients)


def recorded_run(
    steps: Sequence[StepRecord],
    frames_of: Callable[[int], Sequence[Frame]],
    narrow: NumberFormat,
    calls: Iterable[Call] = (),
) -> RecordedRun:
    """``frames_of(step)`` gives the frames of output and weight gradients of one step; ``calls``
    are a script's."""
    gradients, counts = [], np.zeros((len(steps), ABOVE + 1), np.int64)
    for place, record in enumerate(steps):
        frames = frames_of(record.step)
        scale = record.scale if record.scale is not None else 1.0
        gradients.append(step_gradients(record.step, scale, record.skipped, frames, narrow))
        counts[place] = narrow_counts(frames, narrow)
    return RecordedRun(tuple(gradients), counts, narrow, turns_of(calls, steps))


def lost_shares(run: RecordedRun, replay: Replay) -> list[float | None]:
    """Of each step's non-zero gradients the share that becomes zero at the replay's scale; None for
    a step that is skipped, has no gradients recorded, or was recorded with Inf."""
    sums = np.cumsum(run.counts, axis=1)
    shares: list[float | None] = []
    for place, (made, seen) in enumerate(zip(replay.steps, run.gradients, strict=True)):
        total = int(sums[place, -1])
        are_scales = all(0 < scale < math.inf for scale in (made.scale, seen.scale))
        if made.skipped or seen.found_inf or not total or not are_scales:
            shares.append(None)
            continue
        shift = math.floor(math.log2(made.scale) - math.log2(seen.scale))
        below = run.narrow.zero_below_exponent - shift  # exponents that are lost lie below this
        place_of = int(np.searchsorted(EXPONENTS, below))
        shares.append(float(sums[place, place_of - 1]) / total if place_of else 0.0)
    return shares


def first_difference(
    run: RecordedRun, steps: Sequence[StepRecord], policy: Policy, own: Settings
) -> int | None:
    """The first step at which a replay at the run's own settings is not what was recorded: it has
    other settings than it seems, or a scaler whose state was set by hand. None: all agree."""
    starts = first_scales(run.turns, steps)
    made = replay(run.gradients, policy, own, run.turns, starts).steps
    for one, step in zip(made, steps, strict=True):
        if step.scale is not None and (one.scale, one.skipped) != (step.scale, step.skipped):
            return step.step
    return None


def own_settings(spec: RunSpec, first_scale: float | None) -> Settings:
    """A probe's are recorded; of any other run the first scale is, and its framework's defaults."""
    if spec.kind == "probe":
        asked = spec.scaler
        settings = Settings(
            asked.init_scale, asked.growth_interval, asked.growth_factor, asked.backoff_factor
        )
        return allowed(own_policy(spec), settings)
    return replace(own_policy(spec).defaults, initial_scale=first_scale or 1.0)


def own_policy(spec: RunSpec) -> Policy:
    """The policy of the framework that the run trained with."""
    return POLICIES[spec.framework]
