"""What articles promise of AMP, against what was measured here, and why they differ.

"Up to twice the speed, 40 % less memory, twice the batch" are figures of large models on data
centre GPUs. Each reason below rests on a measurement of the same comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.compare.views import Measured, Ratio, memory_ratio, speedup
from ampscope.hardware.capability import DTYPE_LABELS, tensor_cores
from ampscope.hardware.cpu import half_flags
from ampscope.records import Machine, MemorySplit

FASTER, SMALLER, LARGER_BATCH = 2.0, 0.6, 2.0
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


def claims(base: Measured, other: Measured, machine: Machine | None) -> tuple[Claim, ...]:
    """Of ``other`` (a half precision) beside ``base``, on ``machine``."""
    missing = no_fast_path(machine, other.precision)
    return (_speed(base, other, missing), _memory(base, other), _batch(base, other))


def no_fast_path(machine: Machine | None, precision: str) -> str:
    """Why products in ``precision`` cannot be fast on a device, by its flags or its compute
    capability; "" where they can, or where that is unknown."""
    dtype = precision.partition("-")[0]
    if machine is None or not machine.capability or dtype not in ("fp16", "bf16"):
        return ""
    if machine.device == "cpu":
        found = half_flags(tuple(machine.capability.split()), dtype)
        return "" if found else f"this CPU has no instruction for products in {dtype}"
    can = tensor_cores(machine.capability, machine.device_name).accelerates(dtype)
    return f"this GPU has no Tensor Cores for {DTYPE_LABELS[dtype]}" if can is False else ""


def batch_at_the_same_memory(base: Measured, other: Measured) -> float | None:
    """How many times the batch fits into the base's memory, by what grows with the batch and what
    does not. Predicted, not tried."""
    grows = _growth(other)
    if base.memory is None or other.memory is None or grows is None or not base.memory.samples:
        return None
    fixed, per_sample = grows
    return (base.memory.peak - fixed) / per_sample / base.memory.samples


def launch_bound(measured: Measured) -> tuple[int, float] | None:
    """(times the samples, times the time) of the first larger batch, where the time hardly grows;
    None where it does, or was not measured."""
    times = measured.times
    if times is None or not times.samples or not measured.other_times:
        return None
    larger = measured.other_times[0]
    factor, growth = larger.samples // times.samples, larger.step.median_s / times.step.median_s
    at_worst = larger.step.high_s / times.step.low_s  # so that noise tells nothing
    return (factor, growth) if at_worst < BOUND_BY_LAUNCHES * factor / 4 else None


def _speed(base: Measured, other: Measured, missing: str) -> Claim:
    text = "twice as fast"
    if base.times is None or other.times is None:
        return Claim(text, "not measured", None, "")
    ratio = speedup(base.times, other.times)
    met = ratio.value >= FASTER
    return Claim(text, spoken(ratio), met, "" if met else _why_slow(base, other, missing))


def _why_slow(base: Measured, other: Measured, missing: str) -> str:
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


def _slower_when_large(base: Measured, other: Measured) -> str:
    """At a batch so large that time grows with it, products dominate; where half loses there, its
    products are slow."""
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
        f"with {large.samples:,} samples, where products dominate, it takes {ratio:.2g} times as "
        "long: this device has no fast path for its products"
    )


def _memory(base: Measured, other: Measured) -> Claim:
    text = "40 % less memory"
    ratio = memory_ratio(base, other)
    if ratio is None:
        return Claim(text, "not measured", None, "")
    said = f"{1 - ratio:.0%} less" if ratio < 1 else f"{ratio - 1:.0%} more"
    return Claim(text, said, ratio <= SMALLER, "" if ratio <= SMALLER else _why_large(base, other))


def _why_large(base: Measured, other: Measured) -> str:
    reasons = []
    if base.memory is None or other.memory is None:
        return "The memory of a script cannot be split; a workload file's can."
    kept = _fixed(base.memory) / base.memory.peak
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
        reasons.append(f"activations shrink only to {shrunk:.0%}: many ops keep theirs in fp32")
    return _joined(reasons) or "The measurements here do not say why."


def _batch(base: Measured, other: Measured) -> Claim:
    text = "twice the batch"
    ratio = batch_at_the_same_memory(base, other)
    if ratio is None:
        return Claim(text, "not measured", None, "")
    said = f"{ratio:.2f} times in the same memory (predicted; ampscope batch-size proves it)"
    met = ratio >= LARGER_BATCH
    return Claim(text, said, met, "" if met else "For the reasons given for memory.")


def _growth(measured: Measured) -> tuple[float, float] | None:
    """(bytes that do not depend on the batch, bytes a sample)."""
    one, two = measured.memory, measured.other_memory
    if one is None or two is None or two.samples <= one.samples or two.peak <= one.peak:
        return None
    per_sample = (two.peak - one.peak) / (two.samples - one.samples)
    return one.peak - per_sample * one.samples, per_sample


def _fixed(memory: MemorySplit) -> int:
    return memory.weights + memory.gradients + memory.optimizer_state


def _phases(measured: Measured) -> float:
    times = measured.times
    parts = (times.forward, times.backward, times.optimizer) if times else ()
    return sum(part.median_s for part in parts if part is not None)


def spoken(ratio: Ratio) -> str:
    """ "1.31× as fast (1.22 to 1.38)" """
    return f"{ratio.value:.2f}× as fast ({ratio.low:.2f} to {ratio.high:.2f})"


def _joined(reasons: list[str]) -> str:
    text = "; ".join(reasons)
    return text[:1].upper() + text[1:] + "." if text else ""
