"""A first scale and a growth interval for a recorded run, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.analysis.scale_window import ScaleWindow
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


def advise(windows: Sequence[ScaleWindow], steps_between: float = 1.0) -> Advice | None:
    """From the windows of a run's steps, in order and so far apart; None without one."""
    if not windows:
        return None
    ceiling = min(window.high for window in windows)
    floor = max(window.low for window in windows)
    scale = MOST if ceiling >= math.log2(MOST) else 2.0**ceiling
    reason = f"2^{ceiling} is the largest scale that no module overflows in any recorded step"
    if ceiling > math.log2(MOST):
        reason = f"no module overflows below 2^{ceiling}; more than 2^24 gains nothing"
    if floor > ceiling:
        reason += f", though some module loses gradients below 2^{floor}"
    rise = windows[-1].high - windows[0].high
    if rise < CLEAR_RISE:
        why = f"the ceiling does not rise, so growing beyond it costs one step in {USUAL:,}"
        return Advice(scale, USUAL, reason, why)
    halves_in = len(windows) * steps_between / rise
    why = f"gradients halve in about {halves_in:,.0f} steps, and the scale should follow them"
    return Advice(scale, min(max(int(halves_in), LEAST), USUAL), reason, why)
