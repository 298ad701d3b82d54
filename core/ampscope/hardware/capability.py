"""Which Tensor Cores a GPU has, and which dtypes they accelerate, by CUDA compute capability.

    >>> tensor_cores("7.5", "Tesla T4").dtypes
    ('fp16', 'int8', 'int4')
    >>> tensor_cores("7.5", "NVIDIA GeForce GTX 1660 Ti").presence
    <Presence.ABSENT: 'absent'>

The capability alone does not tell: TU116 and TU117 report 7.5 like every other Turing chip and
have no Tensor Cores, so at 7.5 the device's name decides. A capability that is not in the table is
unknown; nothing is extrapolated from its neighbours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

CUDA_GUIDE = (
    "NVIDIA CUDA Programming Guide 13, section 5.1, table 'Input Data Types Supported by Tensor "
    "Core Acceleration per Compute Capability', "
    "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html"
)
VOLTA_PAPER = (
    "NVIDIA Tesla V100 GPU Architecture, WP-08608-001: 'first generation', fp16 products with fp16 "
    "or fp32 sums; before Volta there are none"
)
XAVIER_PTX = "NVIDIA PTX ISA, wmma.mma: fp16 from sm_70, .s8 and .u8 from sm_72"
TURING_PAPER = (
    "NVIDIA Turing GPU Architecture, WP-09183-001: Tensor Cores in TU102, TU104 and TU106; "
    "TU116 and TU117 have none (TechPowerUp GPU database; github.com/pytorch/pytorch/issues/58123)"
)

# Names within the table -> names for people. Keys are those of ampscope.formats where it has them.
DTYPE_LABELS: dict[str, str] = {
    "fp64": "fp64",
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "fp16",
    "e4m3": "fp8 e4m3",
    "e5m2": "fp8 e5m2",
    "e3m2": "fp6 e3m2",
    "e2m3": "fp6 e2m3",
    "e2m1": "fp4 e2m1",
    "int8": "int8",
    "int4": "int4",
}
_FP8 = ("e4m3", "e5m2")
_FP6_FP4 = ("e3m2", "e2m3", "e2m1")
_HALVES = ("tf32", "bf16", "fp16")


class Presence(StrEnum):
    """Whether a device has Tensor Cores."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CapabilityRow:
    """One row of the table; ``capability`` is "8.6", or "12.x" for a whole major version."""

    capability: str
    architecture: str
    generation: int  # of the Tensor Cores
    dtypes: tuple[str, ...]  # of the inputs; keys of DTYPE_LABELS
    source: str


@dataclass(frozen=True, slots=True)
class TensorCoreInfo:
    """What the table says about one device; ``note`` is a sentence where something is special."""

    capability: str
    presence: Presence
    architecture: str = ""
    generation: int | None = None
    dtypes: tuple[str, ...] = ()
    source: str = ""
    note: str = ""

    def accelerates(self, dtype: str) -> bool | None:
        """Whether Tensor Cores take inputs of ``dtype``; None when it is unknown."""
        return None if self.presence is Presence.UNKNOWN else dtype in self.dtypes


CAPABILITIES: tuple[CapabilityRow, ...] = (
    CapabilityRow("7.0", "Volta", 1, ("fp16",), VOLTA_PAPER),
    CapabilityRow("7.2", "Volta (Xavier)", 1, ("fp16", "int8"), XAVIER_PTX),
    CapabilityRow("7.5", "Turing", 2, ("fp16", "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("8.0", "Ampere", 3, ("fp64", *_HALVES, "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("8.6", "Ampere", 3, (*_HALVES, "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("8.7", "Ampere (Orin)", 3, (*_HALVES, "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("8.9", "Ada Lovelace", 4, (*_HALVES, *_FP8, "int8", "int4"), CUDA_GUIDE),
    CapabilityRow("9.0", "Hopper", 4, ("fp64", *_HALVES, *_FP8, "int8"), CUDA_GUIDE),
    CapabilityRow("10.0", "Blackwell", 5, ("fp64", *_HALVES, *_FP8, *_FP6_FP4, "int8"), CUDA_GUIDE),
    CapabilityRow("10.3", "Blackwell Ultra", 5, (*_HALVES, *_FP8, *_FP6_FP4, "int8"), CUDA_GUIDE),
    CapabilityRow("11.0", "Blackwell (Thor)", 5, (*_HALVES, *_FP8, *_FP6_FP4, "int8"), CUDA_GUIDE),
    CapabilityRow("12.x", "Blackwell (RTX)", 5, (*_HALVES, *_FP8, *_FP6_FP4, "int8"), CUDA_GUIDE),
)
_ROWS = {row.capability: row for row in CAPABILITIES}

# Turing by name. Every GTX of capability 7.5 lacks Tensor Cores (the GTX 1650 that is cut from a
# TU106 has them switched off); of the others, these are TU117, and the CMP 30HX is TU116.
_TURING_WITHOUT = re.compile(
    r"\bGTX\b|\bMX\s?(450|550)\b|\bT(400|500|550|600|1000|1200|2000)\b|\bCMP 30HX\b"
)
_TURING_WITH = re.compile(r"\bRTX\b|\bT(4|4G|10|40)\b")


def parse_capability(capability: str | None) -> tuple[int, int] | None:
    """``"8.6"`` -> (8, 6); None for anything else."""
    match = re.fullmatch(r"(\d+)\.(\d+)", capability or "")
    return None if match is None else (int(match[1]), int(match[2]))


def tensor_cores(capability: str | None, device_name: str) -> TensorCoreInfo:
    """What the table says about a device; ``device_name`` as NVML or torch spells it."""
    number = parse_capability(capability)
    if number is None or capability is None:
        note = "The driver did not say which compute capability this device has."
        return TensorCoreInfo(capability or "", Presence.UNKNOWN, note=note)
    if number < (7, 0):
        note = "Tensor Cores came with compute capability 7.0."
        return TensorCoreInfo(capability, Presence.ABSENT, source=VOLTA_PAPER, note=note)
    row = _ROWS.get(capability) or _ROWS.get(f"{number[0]}.x")
    if row is None:
        note = f"Compute capability {capability} is not in ampscope's table."
        return TensorCoreInfo(capability, Presence.UNKNOWN, note=note)
    if number == (7, 5) and not _TURING_WITH.search(device_name):
        return _turing_without(row, device_name)
    return TensorCoreInfo(
        capability, Presence.PRESENT, row.architecture, row.generation, row.dtypes, row.source
    )


def _turing_without(row: CapabilityRow, device_name: str) -> TensorCoreInfo:
    """A Turing device whose name does not promise Tensor Cores."""
    if _TURING_WITHOUT.search(device_name):
        presence = Presence.ABSENT
        note = "TU116 and TU117 chips report 7.5 and have fp16 units in place of Tensor Cores."
    else:
        presence = Presence.UNKNOWN
        note = f"Some chips of capability 7.5 have no Tensor Cores; '{device_name}' may be one."
    return TensorCoreInfo(
        row.capability, presence, row.architecture, source=TURING_PAPER, note=note
    )
