"""A first scale and a growth interval for a recorded run, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampscope.analysis.scale_window import ScaleWindow
from ampscope.analysis.skip_causes import UNSCALED
from ampscope.records import StepRecord
from ampscope.scalers.policies import POLICIES

MOST = 2.0**24  # beyond it a first scale only costs skips
USUAL = POLICIES["torch"].defaults.growth_interval
LEAST = 10  # shorter, and one step in ten is skipped for trying a larger scale
CLEAR_RISE = 2  # powers of two; one is what batches do


@dataclass(frozen=True, slots=True)
class Advice:
    """What to hand to GradScaler; ``reason`` is one sentence for each."""

    initial_scale: float
    growth_interval: int
    scale_reason: str
    interval_reason: str


def skipped_scales(steps: Iterable[StepRecord]) -> list[float]:
    """At which steps were left out for their gradients; a loss that is not finite itself says
    nothing of the scale."""
    return [
        step.scale
        for step in steps
        if step.skipped and step.scale and (step.loss is None or math.isfinite(step.loss))
    ]


def advise(
    windows: Sequence[ScaleWindow], steps_between: float = 1.0, skipped: Iterable[float] = ()
) -> Advice | None:
    """From the windows of a run's steps, in order and so far apart, and the scales at which it
    skipped steps; None without a window, or where it skipped down to where nothing is scaled."""
    lowest_skip = min(skipped, default=math.inf)
    if not windows or lowest_skip <= UNSCALED:
        return None
    ceiling = min(window.high for window in windows)
    floor = max(window.low for window in windows)
    seen = f"output and weight gradients, as far as they were recorded, at {len(windows):,} steps"
    scale = 2.0 ** min(ceiling, math.log2(MOST))
    reason = f"2^{ceiling} is the largest scale that keeps them within fp16 ({seen})"
    if ceiling > math.log2(MOST):
        reason = f"they stay within fp16 up to 2^{ceiling} ({seen}); more than 2^24 gains nothing"
    if scale >= lowest_skip:
        exponent = math.log2(lowest_skip)
        scale = 2.0 ** (math.ceil(exponent) - 1)
        reason = f"this run skipped a step at 2^{round(exponent, 2):g}, and this is below"
    if floor > math.log2(scale):
        reason += f", though some module loses gradients below 2^{floor}"
    rise = windows[-1].high - windows[0].high
    if rise < CLEAR_RISE:
        why = f"the ceiling does not rise, so growing beyond it costs one step in {USUAL:,}"
        return Advice(scale, USUAL, reason, why)
    halves_in = len(windows) * steps_between / rise
    why = f"gradients halve in about {halves_in:,.0f} steps, and the scale should follow them"
    return Advice(scale, min(max(int(halves_in), LEAST), USUAL), reason, why)
