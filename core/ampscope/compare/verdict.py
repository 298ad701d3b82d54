"""One sentence: whether AMP pays here, and what follows.

Paying means a tenth faster, the quartiles on the same side of 1, at a loss that does not differ by
more than seeds do; or a tenth less memory at about the same speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ampscope.compare.claims import launch_bound
from ampscope.compare.losses import LossChange, loss_difference
from ampscope.compare.views import BASES, Measured, Ratio, base_of, memory_ratio, speedup

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
    broken = loss_difference(base, others[0])
    if base.curves and broken.first_nonfinite is not None and broken.change is LossChange.UNKNOWN:
        text = f"{base.precision} itself is not finite from step {broken.first_nonfinite} on"
        return Verdict(Pays.UNKNOWN, f"{text}: find out why first, with ampscope diagnose.", "")
    sound = [m for m in others if loss_difference(base, m).change is not LossChange.DIVERGED]
    if not sound:
        return _diverged(base, others[0])
    found = _judged(base, _best(base, sound))
    beside = _tf32(base, measured)
    return replace(found, sentence=f"{found.sentence} {beside}") if beside else found


def _best(base: Measured, sound: Sequence[Measured]) -> Measured:
    """The fastest of those that pay at the same loss, else at an unknown one; else the fastest."""
    for change in (LossChange.SAME, LossChange.UNKNOWN, LossChange.DIFFERENT):
        alike = [m for m in sound if loss_difference(base, m).change is change]
        paying = [m for m in alike if _ratio(base, m).value >= WORTH]
        if paying:
            return max(paying, key=lambda m: _ratio(base, m).value)
    return max(sound, key=lambda m: _ratio(base, m).value)


def _judged(base: Measured, best: Measured) -> Verdict:
    name, ratio, loss = best.precision, _ratio(base, best), loss_difference(base, best)
    faster = f"{name} is {ratio.value:.2f}× as fast as {base.precision}"
    if loss.change is LossChange.DIFFERENT:
        gap = f"its loss is off by {loss.gap:+.3g}, and seeds differ by {loss.noise:.3g}"
        return Verdict(Pays.UNKNOWN, f"Look at the loss first: {faster}, but {gap}.", name)
    if ratio.value >= WORTH and ratio.low > 1:
        same = loss.change is LossChange.SAME
        at = "at the same loss" if same else f"(whether at the same loss is unknown: {loss.why})"
        return Verdict(Pays.TIME, f"AMP pays here: {faster} {at}; {_scaler(best)}.", name)
    if ratio.value >= WORTH:
        spread = f"the quartiles allow {ratio.low:.2f} to {ratio.high:.2f}"
        text = f"Too noisy to tell: {faster} at the median, and {spread}. Measure again, or longer."
        return Verdict(Pays.UNKNOWN, text, name)
    about = (
        "about the same time as"
        if ratio.value > 1 / WORTH
        else f"{1 / ratio.value:.2f}× the time of"
    )
    slower = f"{name} takes {about} {base.precision}"
    slower += f" ({1 / ratio.value:.2f}×)" if ratio.value > 1 / WORTH else ""
    return _not_faster(base, best, slower)


def _not_faster(base: Measured, best: Measured, slower: str) -> Verdict:
    assert base.times is not None
    name, memory = best.precision, memory_ratio(base, best)
    larger = _pays_from(base, best)
    if larger is not None:
        samples, factor = larger
        at = f"AMP does not pay at a batch of {base.times.samples:,}: {slower}"
        bound = ", most of which goes into launching ops" if launch_bound(best) else ""
        text = f"{at}{bound}; with {samples:,} samples it is {factor:.2f}× as fast."
        return Verdict(Pays.LARGER, text, name)
    if memory is not None and memory <= SMALLER and _ratio(base, best).value > 1 / WORTH:
        needs = f"{name} needs {memory:.0%} of the peak"
        return Verdict(Pays.MEMORY, f"AMP buys memory here, not time: {needs}, and {slower}.", name)
    memory_words = "" if memory is None else f" and {memory:.0%} of its memory"
    return Verdict(Pays.NO, f"AMP does not pay here: {slower}{memory_words}.", name)


def _ratio(base: Measured, other: Measured) -> Ratio:
    assert base.times is not None
    assert other.times is not None
    return speedup(base.times, other.times)


def _tf32(base: Measured, measured: Sequence[Measured]) -> str:
    """What TF32 gives without any autocast, where it was measured beside fp32."""
    found = next((m for m in measured if m.precision == "tf32" and m.times is not None), None)
    if found is None or found is base:
        return ""
    return f"TF32 alone, without autocast, is {_ratio(base, found).value:.2f}× as fast as fp32."


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
