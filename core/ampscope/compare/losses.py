"""Whether the losses of two precisions differ by more than seeds do.

A precision's loss is the mean over the last third of the steps. Both precisions had the same
batches and random state under each seed, so their gap is taken seed by seed and then averaged; the
yardstick is how far the base's seeds lie apart. With one seed there is no yardstick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from ampscope.compare.views import Measured
from ampscope.records import LossCurve


class LossChange(StrEnum):
    """What can be said about a precision's loss beside the base's."""

    SAME = "same"  # within what seeds do
    DIFFERENT = "different"
    DIVERGED = "diverged"  # not finite at the end, where the base is
    UNKNOWN = "unknown"  # one seed, too few steps, or the base itself is not finite


@dataclass(frozen=True, slots=True)
class LossDifference:
    """``gap`` is the mean over seeds of (loss - base's loss); ``noise`` the range of the base's
    losses over seeds; both over the last third of the steps."""

    change: LossChange
    gap: float | None
    noise: float | None
    first_nonfinite: int | None = None  # step, of the first seed in which there was one
    why: str = ""  # it is unknown


def final_loss(curve: LossCurve) -> float:
    """Mean over the last third; NaN and infinities stay what they are, and no losses have NaN."""
    last = curve.losses[-max(1, len(curve.losses) // 3) :]
    return sum(last) / len(last) if last else math.nan


def loss_difference(base: Measured, other: Measured) -> LossDifference:
    """Of two precisions that were trained under the same seeds."""
    bases = {c.seed: final_loss(c) for c in base.curves}
    others = {c.seed: final_loss(c) for c in other.curves}
    pairs = [(bases[seed], others[seed]) for seed in bases if seed in others]
    if not pairs:
        return _unknown("no losses were recorded")
    if not all(math.isfinite(b) for b, _ in pairs):
        step = _first_nonfinite(base)
        return _unknown(f"{base.precision} itself is not finite at the end", first=step)
    if not all(math.isfinite(o) for _, o in pairs):
        return LossDifference(LossChange.DIVERGED, None, None, _first_nonfinite(other))
    if _made_fewer_steps(base, other):
        return _unknown("it made fewer steps, because it is so slow here")
    gap = sum(o - b for b, o in pairs) / len(pairs)
    if len(pairs) < 2:
        return _unknown("one seed is no yardstick", gap)
    noise = max(b for b, _ in pairs) - min(b for b, _ in pairs)
    if not noise:
        return _unknown("every seed made the same run: the script seeds itself", gap, noise)
    change = LossChange.SAME if abs(gap) <= noise else LossChange.DIFFERENT
    return LossDifference(change, gap, noise)


def _unknown(
    why: str, gap: float | None = None, noise: float | None = None, first: int | None = None
) -> LossDifference:
    return LossDifference(LossChange.UNKNOWN, gap, noise, first, why)


def _made_fewer_steps(base: Measured, other: Measured) -> bool:
    """So slow here that it was not trained as long."""
    lengths = {c.seed: len(c.losses) for c in base.curves}
    return any(len(c.losses) < lengths.get(c.seed, 0) for c in other.curves)


def _first_nonfinite(measured: Measured) -> int | None:
    for curve in measured.curves:
        for step, loss in enumerate(curve.losses):
            if not math.isfinite(loss):
                return step
    return None
