"""One sentence: whether AMP pays here, and what follows.

Paying means a tenth faster, the quartiles on the same side of 1, at a loss that does not differ by
more than seeds do; or a tenth less memory at about the same speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ampscope.compare.claims import launch_bound
from ampscope.compare.losses import LossChange, LossDifference, loss_difference
from ampscope.compare.views import BASES, Measured, base_of, memory_ratio, speedup

WORTH = 1.1  # a change of a script that gains less than a tenth is hardly worth its risks
SMALLER = 0.9


class Pays(StrEnum):
    """The answer in one word."""

    TIME = "time"
    MEMORY = "memory"
    LARGER = "larger"  # not at this batch, at a larger one
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``sentence`` begins with the answer; ``precision`` is the one that it speaks of."""

    pays: Pays
    sentence: str
    precision: str


def verdict(measured: Sequence[Measured]) -> Verdict:
    """Of a comparison that has ended; "unknown" where there is nothing to compare."""
    base = base_of(measured)
    others = [m for m in measured if m.precision not in BASES and m.times is not None]
    if base is None or base.times is None or base.precision not in BASES or not others:
        return Verdict(Pays.UNKNOWN, "Compare fp32 with at least one half precision.", "")
    sound = [m for m in others if loss_difference(base, m).change is not LossChange.DIVERGED]
    if not sound:
        return _diverged(base, others[0])
    best = max(sound, key=lambda m: speedup(base.times, m.times).value)  # type: ignore[arg-type]  # both have times, see above
    return _judged(base, best)


def _judged(base: Measured, best: Measured) -> Verdict:
    assert base.times is not None
    assert best.times is not None
    name, ratio = best.precision, speedup(base.times, best.times)
    loss = loss_difference(base, best)
    memory = memory_ratio(base, best)
    if ratio.value >= WORTH and ratio.low > 1:
        text = f"{name} is {ratio.value:.2f}× as fast as {base.precision} {_at(loss)}"
        if loss.change is LossChange.DIFFERENT:
            return Verdict(Pays.UNKNOWN, f"Look at the loss first: {text}.", name)
        return Verdict(Pays.TIME, f"AMP pays here: {text}; {_scaler(best)}.", name)
    time_words = f"{name} takes {1 / ratio.value:.2f}× the time of {base.precision}"
    larger = _pays_from(base, best)
    if larger is not None:
        samples, factor = larger
        at = f"AMP does not pay at a batch of {base.times.samples:,}: {time_words}"
        bound = ", which goes into launching ops" if launch_bound(best) else ""
        text = f"{at}{bound}; with {samples:,} samples it is {factor:.2f}× as fast."
        return Verdict(Pays.LARGER, text, name)
    if memory is not None and memory <= SMALLER and ratio.value > 1 / WORTH:
        text = f"AMP buys memory here, not time: {name} needs {memory:.0%} of the peak"
        return Verdict(Pays.MEMORY, f"{text}, and {time_words} {_at(loss)}.", name)
    memory_words = "" if memory is None else f" and {memory:.0%} of its memory"
    return Verdict(Pays.NO, f"AMP does not pay here: {time_words}{memory_words}.", name)


def _pays_from(base: Measured, best: Measured) -> tuple[int, float] | None:
    """The smallest larger batch at which it pays."""
    for times in best.other_times:
        beside = base.times_at(times.samples)
        if beside is None:
            continue
        ratio = speedup(beside, times)
        if ratio.value >= WORTH and ratio.low > 1:
            return times.samples, ratio.value
    return None


def _at(loss: LossDifference) -> str:
    if loss.change is LossChange.SAME:
        return "at the same loss"
    if loss.change is LossChange.DIFFERENT:
        return f"but its loss is off by {loss.gap:+.3g}, and seeds differ by {loss.noise:.3g}"
    return "(too few seeds or steps to tell whether the loss is the same)"


def _scaler(best: Measured) -> str:
    if best.precision.startswith("bf16"):
        return "bf16 needs no scaler"
    if best.skips:
        return f"its GradScaler left out {best.skips} of the steps that were made"
    return "its GradScaler left out no step"


def _diverged(base: Measured, other: Measured) -> Verdict:
    step = loss_difference(base, other).first_nonfinite
    when = "" if step is None else f" at step {step}"
    text = f"{other.precision} diverged{when} where {base.precision} did not: ampscope diagnose"
    return Verdict(Pays.NO, f"AMP does not pay here: {text} finds out why.", other.precision)
