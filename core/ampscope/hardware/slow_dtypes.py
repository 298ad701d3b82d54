"""Why a dtype is slower than its neighbours suggest: the likeliest reason that is known, or none.

In this order: the chip has nothing that multiplies the dtype; the TF32 flag had no effect; the
clocks were held down while it was measured. A reason is likely, not proven; where nothing fits the
sentence says "unknown".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.hardware.capability import DTYPE_LABELS, TensorCoreInfo
from ampscope.hardware.cpu import PRODUCT_FLAGS, half_flags
from ampscope.hardware.disturbances import held_down
from ampscope.records import Sample

NO_EFFECT = 1.25  # TF32 is at least twice fp32 on every chip that has both at different rates
VECTOR_DTYPES = ("fp64", "fp32")  # for which a GPU has other units too
UNKNOWN = "Unknown: the table, the flags and the readings do not explain it."


@dataclass(frozen=True, slots=True)
class Slow:
    """A dtype that falls behind."""

    dtype: str
    flops_s: float
    fp32_flops_s: float | None  # at the same sizes


def likely_reason(
    slow: Slow,
    tensor_cores: TensorCoreInfo | None,
    cpu_flags: tuple[str, ...] | None,
    is_cpu: bool,
    samples: Sequence[Sample],
) -> str:
    """One sentence."""
    if is_cpu:
        return _on_cpu(slow, cpu_flags)
    label = DTYPE_LABELS.get(slow.dtype, slow.dtype)
    has_path = tensor_cores.accelerates(slow.dtype) if tensor_cores else None
    if slow.dtype not in VECTOR_DTYPES and has_path is False:  # None is unknown
        where = f"capability {tensor_cores.capability}" if tensor_cores else ""
        return f"There is no Tensor Core path for {label} on this chip ({where})."
    if slow.dtype == "tf32" and _is_like_fp32(slow):
        return (
            "The TF32 flag had no effect: it is as fast as fp32. Look for NVIDIA_TF32_OVERRIDE=0 "
            "in the environment."
        )
    return held_down(samples) or UNKNOWN


def _is_like_fp32(slow: Slow) -> bool:
    return slow.fp32_flops_s is not None and slow.flops_s < NO_EFFECT * slow.fp32_flops_s


def _on_cpu(slow: Slow, flags: tuple[str, ...] | None) -> str:
    label = DTYPE_LABELS.get(slow.dtype, slow.dtype)
    if slow.dtype == "e4m3":
        return f"No CPU instruction that ampscope knows multiplies {label}; torch converts it."
    if slow.dtype not in PRODUCT_FLAGS:
        return UNKNOWN
    have = half_flags(flags, slow.dtype)
    if have is None:
        return f"Unknown: whether this CPU has instructions that multiply {label} cannot be read."
    if have:
        return f"Unknown: the CPU has {have[0]}, but this torch build may not use it."
    lacking = ", ".join(PRODUCT_FLAGS[slow.dtype])
    return f"This CPU has no instruction that multiplies {label} (none of {lacking})."
