"""One sentence: whether AMP pays here, and what follows.

Paying means a tenth faster, the quartiles on the same side of 1, at a loss that does not differ by
more than seeds do; or a tenth less memory at about the same speed.

What articles promise is set beside it (:func:`claims`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ampscope.ext.compare.comparison import (
    BASES,
    LossChange,
    PrecisionResults,
    Ratio,
    base_of,
    by_precision,
    loss_difference,
    memory_ratio,
    speedup,
)
from ampscope.hardware.capability import DTYPE_LABELS, tensor_cores
from ampscope.hardware.cpu import half_flags
from ampscope.record_json import dumps
from ampscope.records import Machine, Result, RunInfo

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
class AmpVerdict:
    """``sentence`` begins with the answer; ``precision`` is the one that it speaks of."""

    pays: Pays
    sentence: str
    precision: str


def verdict(measured: Sequence[PrecisionResults]) -> AmpVerdict:
    """Of a comparison that has ended; "unknown" where there is nothing to compare."""
    base = base_of(measured)
    others = [m for m in measured if m.precision not in BASES and m.times is not None]
    if base is None or base.times is None or base.precision not in BASES or not others:
        return AmpVerdict(Pays.UNKNOWN, "Compare fp32 with at least one half precision.", "")
    broken = loss_difference(base, others[0])
    if base.curves and broken.first_nonfinite is not None and broken.change is LossChange.UNKNOWN:
        text = f"{base.precision} itself is first not finite at step {broken.first_nonfinite}"
        return AmpVerdict(Pays.UNKNOWN, f"{text}: find out why first, with ampscope diagnose.", "")
    sound = [m for m in others if loss_difference(base, m).change is not LossChange.DIVERGED]
    if not sound:
        return _diverged(base, others[0])
    found = _judged(base, _best(base, sound))
    beside = _tf32(base, measured)
    return replace(found, sentence=f"{found.sentence} {beside}") if beside else found


def _best(base: PrecisionResults, sound: Sequence[PrecisionResults]) -> PrecisionResults:
    """The fastest of those that pay at the same loss, else at an unknown one; else the fastest."""
    for change in (LossChange.SAME, LossChange.UNKNOWN, LossChange.DIFFERENT):
        alike = [m for m in sound if loss_difference(base, m).change is change]
        paying = [m for m in alike if _ratio(base, m).value >= WORTH]
        if paying:
            return max(paying, key=lambda m: _ratio(base, m).value)
    return max(sound, key=lambda m: _ratio(base, m).value)


def _judged(base: PrecisionResults, best: PrecisionResults) -> AmpVerdict:
    name, ratio, loss = best.precision, _ratio(base, best), loss_difference(base, best)
    faster = f"{name} is {ratio.value:.2f}× as fast as {base.precision}"
    if loss.change is LossChange.DIFFERENT:
        gap = f"its loss is off by {loss.gap:+.3g}, and seeds differ by {loss.noise:.3g}"
        return AmpVerdict(Pays.UNKNOWN, f"Look at the loss first: {faster}, but {gap}.", name)
    if ratio.value >= WORTH and ratio.low > 1:
        same = loss.change is LossChange.SAME
        at = "at the same loss" if same else f"(whether at the same loss is unknown: {loss.why})"
        return AmpVerdict(Pays.TIME, f"AMP pays here: {faster} {at}; {_scaler(best)}.", name)
    if ratio.value >= WORTH:
        spread = f"the quartiles allow {ratio.low:.2f} to {ratio.high:.2f}"
        text = f"Too noisy to decide: {faster} at the median, and {spread}. Measure longer."
        return AmpVerdict(Pays.UNKNOWN, text, name)
    about = (
        "about the same time as"
        if ratio.value > 1 / WORTH
        else f"{1 / ratio.value:.2f}× the time of"
    )
    slower = f"{name} takes {about} {base.precision}"
    slower += f" ({1 / ratio.value:.2f}×)" if ratio.value > 1 / WORTH else ""
    return _not_faster(base, best, slower)


def _not_faster(base: PrecisionResults, best: PrecisionResults, slower: str) -> AmpVerdict:
    assert base.times is not None
    name, memory = best.precision, memory_ratio(base, best)
    larger = _pays_from(base, best)
    if larger is not None:
        samples, factor = larger
        at = f"AMP does not pay at a batch of {base.times.samples:,}: {slower}"
        bound = ", most of which goes into launching ops" if launch_bound(best) else ""
        text = f"{at}{bound}; with {samples:,} samples it is {factor:.2f}× as fast."
        return AmpVerdict(Pays.LARGER, text, name)
    if memory is not None and memory <= SMALLER and _ratio(base, best).value > 1 / WORTH:
        needs = f"{name} needs {memory:.0%} of the peak"
        return AmpVerdict(
            Pays.MEMORY, f"AMP buys memory here, not time: {needs}, and {slower}.", name
        )
    memory_words = "" if memory is None else f" and {memory:.0%} of its memory"
    return AmpVerdict(Pays.NO, f"AMP does not pay here: {slower}{memory_words}.", name)


def _ratio(base: PrecisionResults, other: PrecisionResults) -> Ratio:
    assert base.times is not None
    assert other.times is not None
    return speedup(base.times, other.times)


def _tf32(base: PrecisionResults, measured: Sequence[PrecisionResults]) -> str:
    """What TF32 gives without any autocast, where it was measured beside fp32."""
    found = next((m for m in measured if m.precision == "tf32" and m.times is not None), None)
    if found is None or found is base:
        return ""
    return f"TF32 alone, without autocast, is {_ratio(base, found).value:.2f}× as fast as fp32."


def _pays_from(base: PrecisionResults, best: PrecisionResults) -> tuple[int, float] | None:
    """The smallest larger batch at which it pays."""
    for times in best.other_times:
        beside = base.times_at(times.samples)
        if beside is None:
            continue
        ratio = speedup(beside, times)
        if ratio.value >= WORTH and ratio.low > 1:
            return times.samples, ratio.value
    return None


def _scaler(best: PrecisionResults) -> str:
    if best.precision.startswith("bf16"):
        return "bf16 needs no scaler"
    if best.skips:
        return f"its GradScaler left out {best.skips} of the steps that were made"
    return "its GradScaler left out no step"


def _diverged(base: PrecisionResults, other: PrecisionResults) -> AmpVerdict:
    step = loss_difference(base, other).first_nonfinite
    when = "" if step is None else f" at step {step}"
    text = f"{other.precision} diverged{when} where {base.precision} did not: ampscope diagnose"
    return AmpVerdict(Pays.NO, f"AMP does not pay here: {text} finds out why.", other.precision)


# "Up to twice the speed, 40 % less memory, twice the batch": what articles promise of AMP, by large
# models on data centre GPUs.
FASTER, CLEARLY_SMALLER, LARGER_BATCH = 2.0, 0.6, 2.0
# A step with 4 times the samples that takes less than twice as long spends most of its time on
# what does not depend on the samples: launching ops, the optimizer.
BOUND_BY_LAUNCHES = 2.0
SLOWER = 1.1  # times as long
MANY_CASTS = 0.05
LARGE_OPTIMIZER = 0.15
LARGE_FIXED = 0.3


@dataclass(frozen=True, slots=True)
class Claim:
    """One row: promised, measured, met or not, and the reasons."""

    claim: str
    measured: str
    is_met: bool | None  # None: not measured
    why: str


def claims(
    base: PrecisionResults, other: PrecisionResults, machine: Machine | None
) -> tuple[Claim, ...]:
    """What articles promise of ``other`` (a half precision), what was measured of it beside
    ``base``, and why they differ on ``machine``: each reason rests on a measurement."""
    missing = no_fast_path(machine, other.precision)
    return (_speed(base, other, missing), _memory(base, other), _batch(base, other))


def no_fast_path(machine: Machine | None, precision: str) -> str:
    """Why matmuls in ``precision`` cannot be fast on a device, by its flags or its compute
    capability; "" where they can, or where that is unknown."""
    dtype = precision.partition("-")[0]
    if machine is None or not machine.capability or dtype not in ("fp16", "bf16"):
        return ""
    if machine.device == "cpu":
        found = half_flags(tuple(machine.capability.split()), dtype)
        return "" if found else f"this CPU has no instruction for matmuls in {dtype}"
    can = tensor_cores(machine.capability, machine.device_name).accelerates(dtype)
    return f"this GPU has no Tensor Cores for {DTYPE_LABELS[dtype]}" if can is False else ""


def batch_at_the_same_memory(base: PrecisionResults, other: PrecisionResults) -> float | None:
    """How many times the batch fits into the base's memory, by what grows with the batch and what
    does not. Predicted, not tried."""
    grows = _growth(other)
    if base.memory is None or other.memory is None or grows is None or not base.memory.samples:
        return None
    fixed, per_sample = grows
    return (base.memory.peak - fixed) / per_sample / base.memory.samples


def launch_bound(measured: PrecisionResults) -> tuple[int, float] | None:
    """(times the samples, times the time) of the first larger batch, where the time hardly grows;
    None where it does, or was not measured."""
    times = measured.times
    if times is None or not times.samples or not measured.other_times:
        return None
    larger = measured.other_times[0]
    factor, growth = larger.samples // times.samples, larger.step.median_s / times.step.median_s
    at_worst = larger.step.high_s / times.step.low_s  # so that noise tells nothing
    return (factor, growth) if at_worst < BOUND_BY_LAUNCHES * factor / 4 else None


def _speed(base: PrecisionResults, other: PrecisionResults, missing: str) -> Claim:
    text = "twice as fast"
    if base.times is None or other.times is None:
        return Claim(text, "not measured", None, "")
    ratio = speedup(base.times, other.times)
    met = ratio.value >= FASTER
    return Claim(text, spoken(ratio), met, "" if met else _why_slow(base, other, missing))


def _why_slow(base: PrecisionResults, other: PrecisionResults, missing: str) -> str:
    reasons = [missing] if missing else []
    bound = launch_bound(other)
    if bound:
        reasons.append(
            f"a step with {bound[0]} times the samples takes only {bound[1]:.2g} times as long: at "
            "this batch the time goes into launching ops, which half precision does not shorten"
        )
    slower = _slower_when_large(base, other)
    if slower and not missing:
        reasons.append(slower)
    times = base.times
    if times and times.optimizer and times.optimizer.median_s > LARGE_OPTIMIZER * _phases(base):
        share = times.optimizer.median_s / _phases(base)
        reasons.append(f"the optimizer, {share:.0%} of the base's step, works in fp32 as before")
    if other.times and (other.times.cast_share or 0) > MANY_CASTS:
        reasons.append(f"casts take {other.times.cast_share:.0%} of the time in ops")
    return _joined(reasons) or "The measurements here do not say why."


def _slower_when_large(base: PrecisionResults, other: PrecisionResults) -> str:
    """At a batch so large that time grows with it, matmuls dominate; where half loses there, its
    matmuls are slow."""
    if not base.times or not base.other_times or not other.other_times:
        return ""
    large = other.other_times[-1]
    beside = base.times_at(large.samples)
    if beside is None or speedup(beside, large).value > 1 / SLOWER:
        return ""
    factor = large.samples / base.times.samples
    if beside.step.median_s < base.times.step.median_s * factor / 2:
        return ""
    ratio = large.step.median_s / beside.step.median_s
    return (
        f"with {large.samples:,} samples, where matmuls dominate, it takes {ratio:.2g} times as "
        "long: this device has no fast path for its matmuls"
    )


def _memory(base: PrecisionResults, other: PrecisionResults) -> Claim:
    text = "40 % less memory"
    ratio = memory_ratio(base, other)
    if ratio is None:
        return Claim(text, "not measured", None, "")
    said = f"{1 - ratio:.0%} less" if ratio < 1 else f"{ratio - 1:.0%} more"
    return Claim(
        text,
        said,
        ratio <= CLEARLY_SMALLER,
        "" if ratio <= CLEARLY_SMALLER else _why_large(base, other),
    )


def _why_large(base: PrecisionResults, other: PrecisionResults) -> str:
    reasons = []
    if base.memory is None or other.memory is None:
        return "The memory of a script cannot be split; a workload file's can."
    kept = base.memory.fixed / base.memory.peak
    if kept > LARGE_FIXED:
        reasons.append(
            f"{kept:.0%} of the base's peak is weights, gradients and optimizer state, which "
            "autocast leaves in fp32"
        )
    casts = other.memory.cast_copies / base.memory.peak
    if casts > MANY_CASTS:
        reasons.append(f"copies in another format take {casts:.0%} of the base's peak")
    shrunk = other.memory.activations / max(base.memory.activations, 1)
    if shrunk > 0.6:
        how = f"shrink only to {shrunk:.0%}" if shrunk < 0.995 else "do not shrink"
        reasons.append(f"activations {how}: many ops keep theirs in fp32")
    return _joined(reasons) or "The measurements here do not say why."


def _batch(base: PrecisionResults, other: PrecisionResults) -> Claim:
    text = "twice the batch"
    ratio = batch_at_the_same_memory(base, other)
    if ratio is None:
        return Claim(text, "not measured", None, "")
    said = f"{ratio:.2f} times in the same memory (predicted; ampscope batch-size proves it)"
    met = ratio >= LARGER_BATCH
    return Claim(text, said, met, "" if met else "For the reasons given for memory.")


def _growth(measured: PrecisionResults) -> tuple[float, float] | None:
    """(bytes that do not depend on the batch, bytes per sample)."""
    one, two = measured.memory, measured.other_memory
    if one is None or two is None or two.samples <= one.samples or two.peak <= one.peak:
        return None
    per_sample = (two.peak - one.peak) / (two.samples - one.samples)
    return one.peak - per_sample * one.samples, per_sample


def _phases(measured: PrecisionResults) -> float:
    times = measured.times
    parts = (times.forward, times.backward, times.optimizer) if times else ()
    return sum(part.median_s for part in parts if part is not None)


def spoken(ratio: Ratio) -> str:
    """ "1.31× as fast (1.22 to 1.38)" """
    return f"{ratio.value:.2f}× as fast ({ratio.low:.2f} to {ratio.high:.2f})"


def _joined(reasons: list[str]) -> str:
    text = "; ".join(reasons)
    return text[:1].upper() + text[1:] + "." if text else ""


SCHEMA = 1


def comparison_json(info: RunInfo, results: Sequence[Result], spoiled: Sequence[str] = ()) -> str:
    """The verdict, what it rests on, and every measurement behind it. NaN and infinities are texts,
    because JSON has neither. ``spoiled`` names what disturbed the measurement."""
    measured = by_precision(results)
    base, judged = base_of(measured), verdict(measured)
    beside = [m for m in measured if base is not None and m is not base]
    content = {
        "schema": SCHEMA,
        "run": info.id,
        "workload": info.spec.workload,
        "size": info.spec.size,
        "machine": dataclasses.asdict(info.machine) if info.machine else None,
        "measured_at": info.started,
        "note": info.message,
        "spoiled": list(spoiled),
        "verdict": dataclasses.asdict(judged),
        "base": base.precision if base else None,
        "precisions": [dataclasses.asdict(m) for m in measured],
        "beside_the_base": [
            {
                "precision": m.precision,
                "speedup": dataclasses.asdict(speedup(base.times, m.times))
                if base.times and m.times
                else None,
                "memory_ratio": memory_ratio(base, m),
                "loss": dataclasses.asdict(loss_difference(base, m)),
                "claims": [dataclasses.asdict(c) for c in claims(base, m, info.machine)]
                if m.precision not in BASES
                else [],
            }
            for m in beside
            if base is not None
        ],
    }
    return dumps(content, indent=2)
