"""Sentences about Tensor Cores in a step, for the terminal and the page alike."""

from __future__ import annotations

from ampscope.analysis.core_use import CoreUse, ProductUse
from ampscope.analysis.core_verdict import Verdict
from ampscope.analysis.padding_gains import PaddingGain, best_gain
from ampscope.hardware.cpu import PRODUCT_FLAGS
from ampscope.hardware.eligibility import Fit

ON_A_CPU = (
    "A CPU has no Tensor Cores. Its instructions that multiply half numbers (AVX512-BF16, AMX) "
    "take their place here; fp32 products never use them."
)


def answer(use: CoreUse) -> str:
    """What the page says first: how many products, what share of the FLOPs, and what to do."""
    parts = [_used(use)]
    unknown, measured = use.calls(Verdict.UNKNOWN), use.calls()
    if unknown:
        parts.append(f"of {unknown:,} it is unknown")
    if measured < use.step.calls:
        parts.append(f"{use.step.calls - measured:,} are not measured yet")
    gain = best_gain([u.product for u in use.uses])
    if gain is not None:
        parts.append(padding_words(gain))
    why = "" if use.calls(Verdict.USED) else why_not(use)
    return f"{'; '.join(parts)}. {why}".strip()


def why_not(use: CoreUse) -> str:
    """Of the products that do not use them, the reason with most FLOPs; empty where all do."""
    reasons: dict[str, int] = {}
    for one in use.uses:
        if one.verdict is not Verdict.USED and one.eligibility.fit in (Fit.NOT, Fit.UNKNOWN):
            reason = one.eligibility.reason
            reasons[reason] = reasons.get(reason, 0) + one.step_flops
    return max(reasons, key=lambda reason: reasons[reason]) if reasons else ""


def units(use: CoreUse) -> str:
    """What takes the place of Tensor Cores on this device."""
    if use.step.device != "cpu":
        return "Tensor Cores"
    flags = [flag for names in PRODUCT_FLAGS.values() for flag in names]
    has = [flag for flag in flags if flag in (use.step.cpu_flags or ())]
    return f"this CPU's half-precision instructions{f' ({has[0]})' if has else ''}"


def padding_words(gain: PaddingGain) -> str:
    """ "head misses by one dimension: padding 50257 to 50304 gains 1.8×, measured" """
    many = "one dimension" if len(gain.changes) == 1 else f"{len(gain.changes)} dimensions"
    changed = " and ".join(f"{size} to {padded}" for size, padded in gain.changes)
    times = f"{gain.gain:.1f}×" if gain.gain >= 1.15 else f"{gain.gain:.2f}×"
    layer = gain.module or "the model"
    return f"{layer} misses by {many}: padding {changed} gains {times}, measured"


def signs_words(one: ProductUse) -> str:
    """Why the verdict is what it is."""
    names = {
        "used": "its kernel's name says used",
        "not used": "its kernel's name says not used",
        "nothing": "its kernel's name says nothing" if one.product.kernels else "no name was seen",
    }[one.names]
    return f"{names}; {one.rate.reason}"


def _used(use: CoreUse) -> str:
    used, calls = use.calls(Verdict.USED), use.step.calls
    plain = "product" if calls == 1 else "products"
    if not used:
        runs = "is known to run" if use.calls(Verdict.UNKNOWN) else "runs"
        return f"None of {calls:,} {plain} {runs} on {units(use)}"
    share = 100 * use.share(Verdict.USED)
    number = f"{share:.0f}" if share > 99.95 or share < 0.1 else f"{share:.1f}"
    return f"{used:,} of {calls:,} {plain}, {number} % of the FLOPs, run on {units(use)}"
