"""Tensor Cores used, not used or unknown, from two independent signs: the names of the kernels, and
the rate that the product reaches alone against its control, the same shapes in fp32 without TF32.

The rate speaks only where nothing else explains it:
- the device's largest product in that dtype must itself be faster than fp32's, else a rate tells
  nothing (consumer GPUs compute TF32 no faster than fp32);
- half the bytes make a product that waits for memory up to twice as fast, with no Tensor Core;
- a product that its launch or its memory holds up is not faster even when it uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ampscope.hardware.kernel_signs import Sign
from ampscope.records import Product, Timing

TELLING_GAIN = 1.3  # of the dtype's largest product over fp32's; below it no rate can tell
# A product must be half as far above its control, on a log scale, as the largest one is; twice as
# fast is always enough, because plain units compute half inputs with fp32 sums at fp32's rate.
USED_FROM_MOST = 2.0
SLOWER = 1.5  # times as long as in fp32, by the nearer quartiles
NOT_USED_BELOW = 1.15  # quartiles of equal work on a busy machine lie up to 10 % apart
WAITS_FOR_MEMORY = 0.5  # share of its time that a copy of its bytes would take
COMPUTES = 0.5  # share of fp32's ceiling from which arithmetic is what limits a control


class Verdict(StrEnum):
    """Of one product."""

    USED = "used"
    NOT_USED = "not used"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reached in the same run: FLOP/s by dtype, bytes/s of a copy."""

    flops_s: Mapping[str, float] = field(default_factory=dict)
    bytes_s: float | None = None

    def gain(self, dtype: str) -> float | None:
        """The largest product in ``dtype`` over that in fp32."""
        of, base = self.flops_s.get(dtype), self.flops_s.get("fp32")
        return of / base if of and base else None


@dataclass(frozen=True, slots=True)
class RateSign:
    """What the rate says, in one sentence why, and how many times as fast as the control it is."""

    sign: Sign
    reason: str
    speedup: float | None = None


def verdict(names: Sign, rate: Sign) -> Verdict:
    """Unknown where the two disagree and where neither speaks; else what was said."""
    said = {names, rate} - {Sign.NOTHING}
    if said == {Sign.USED}:
        return Verdict.USED
    return Verdict.NOT_USED if said == {Sign.NOT_USED} else Verdict.UNKNOWN


def rate_sign(product: Product, ceilings: Ceilings) -> RateSign:
    """From the product's own timing, its control's and the ceilings."""
    if product.dtype == "fp32":
        return RateSign(Sign.NOT_USED, "It is computed in plain fp32, as controls are.")
    timing, control = product.timing, product.control
    if timing is None or control is None:
        return RateSign(Sign.NOTHING, "It has no timing beside a control.")
    speedup = control.median_s / timing.median_s
    if timing.low_s > SLOWER * control.high_s:
        text = f"Its fp32 control is {1 / speedup:.2g}× as fast: whatever it uses does not help."
        return RateSign(Sign.NOT_USED, text, speedup)
    gain = ceilings.gain(product.dtype)
    if gain is None:
        return RateSign(Sign.NOTHING, "The ceilings were not measured.", speedup)
    if gain < 1 / TELLING_GAIN:
        return RateSign(
            Sign.NOT_USED,
            f"No {product.dtype} product is fast here: the largest reaches {gain:.2g}× fp32.",
            speedup,
        )
    if gain < TELLING_GAIN:
        return RateSign(
            Sign.NOTHING,
            f"The largest {product.dtype} product is only {gain:.2g}× as fast as fp32's.",
            speedup,
        )
    return _compared(product, timing, control, ceilings, gain)


def _compared(
    product: Product, timing: Timing, control: Timing, ceilings: Ceilings, gain: float
) -> RateSign:
    """The quartiles that lie nearer to each other decide, not the medians."""
    speedup = control.median_s / timing.median_s
    width = 1 if product.dtype == "tf32" else 2  # bytes of fp32 over those of the dtype
    explained = width if _waits(product.moved_bytes * width, control, ceilings) else 1
    needed = explained * min(math.sqrt(gain), USED_FROM_MOST)
    if control.low_s / timing.high_s >= needed:
        return RateSign(
            Sign.USED, f"{speedup:.2g}× as fast as its fp32 control; {needed:.2g}× tells.", speedup
        )
    base = ceilings.flops_s["fp32"]
    computes = product.flops / control.median_s >= COMPUTES * base
    if computes and control.high_s / timing.low_s <= NOT_USED_BELOW:
        return RateSign(
            Sign.NOT_USED, f"No faster than its fp32 control ({speedup:.2g}×).", speedup
        )
    why = "memory" if explained > 1 else "launch or memory" if not computes else "neither clearly"
    text = f"{speedup:.2g}× its fp32 control, which does not tell ({why})."
    return RateSign(Sign.NOTHING, text, speedup)


def _waits(moved_bytes: int, timing: Timing, ceilings: Ceilings) -> bool:
    """Whether moving its bytes alone would take a good part of its time."""
    if not ceilings.bytes_s:
        return False
    return moved_bytes / ceilings.bytes_s >= WAITS_FOR_MEMORY * timing.median_s
