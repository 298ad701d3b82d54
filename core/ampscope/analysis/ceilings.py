"""What a machine reached in each dtype, beside the vendor's figure, and which dtypes fall behind.

    found = ceilings(rates, Chip(vendor=vendor_figures(name), tensor_cores=…, cpu_flags=None))
    found[0].dtype, found[0].flops_s, found[0].share, found[0].reason

A dtype falls behind when it reaches under half of what its neighbours suggest. Where the vendor
gives figures, these are its own figure times the share that the others reach of theirs; else the
best rate of a dtype that is as wide or wider, because narrower numbers cost no more to multiply.
fp64 has no such neighbour: many chips multiply it slowly on purpose.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ampscope.analysis.telemetry import LEAST_SHARE, OTHERS_PERCENT, by_device, held_back, usage
from ampscope.hardware.capability import DTYPE_LABELS, TensorCoreInfo
from ampscope.hardware.cpu import MATMUL_FLAGS, half_flags
from ampscope.records import Rate, Sample

# From wide to narrow: bits of one number.
WIDTHS: dict[str, int] = {
    "fp64": 64,
    "fp32": 32,
    "tf32": 19,
    "bf16": 16,
    "fp16": 16,
    "int8": 8,
    "e4m3": 8,
}
LABELS = {name: DTYPE_LABELS.get(name, name) for name in WIDTHS}  # for people
FILE = "vendor_figures.toml"
SERIES, COPY = "ceiling", "copy"
BEHIND = 0.5  # of what the neighbours suggest
NO_EFFECT = 1.25  # TF32 is at least twice fp32 on every chip that has both at different rates
VECTOR_DTYPES = ("fp64", "fp32")  # for which a GPU has other units too
UNKNOWN = "Unknown: the table, the flags and the readings do not explain it."


@dataclass(frozen=True, slots=True)
class Chip:
    """What is known of the device without measuring; None is unknown, or does not apply."""

    vendor: VendorFigures | None = None
    tensor_cores: TensorCoreInfo | None = None  # of a CUDA device
    cpu_flags: tuple[str, ...] | None = None  # of a CPU
    is_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One dtype: the best rate over all sizes."""

    dtype: str
    best: Rate | None  # None: not measured, and ``note`` says why
    vendor_flops_s: float | None
    expected_flops_s: float | None  # what the neighbours suggest at the same sizes
    reason: str = ""  # why it falls behind; empty where it does not
    note: str = ""

    @property
    def flops_s(self) -> float | None:
        """Operations per second at the median of the best size."""
        return self.best.flops_s if self.best else None

    @property
    def share(self) -> float | None:
        """Of the vendor's figure."""
        figure = self.vendor_flops_s
        return self.flops_s / figure if self.flops_s is not None and figure else None


def ceilings(rates: Sequence[Rate], chip: Chip, samples: Sequence[Sample] = ()) -> list[Ceiling]:
    """One a dtype that was tried, from wide to narrow; ``samples`` are readings beside the run."""
    tried = [r for r in rates if r.series == SERIES]
    vendor = dict(chip.vendor.flops_s) if chip.vendor else {}
    return [
        _ceiling(dtype, tried, vendor, chip, samples)
        for dtype in WIDTHS
        if any(r.dtype == dtype for r in tried)
    ]


def _ceiling(
    dtype: str,
    rates: Sequence[Rate],
    vendor: Mapping[str, float],
    chip: Chip,
    samples: Sequence[Sample],
) -> Ceiling:
    best = _best(rates, dtype)
    if best is None:
        note = next(r.note for r in rates if r.dtype == dtype)
        return Ceiling(dtype, None, vendor.get(dtype), None, note=note)
    # A dtype that was too slow for large sizes is held against others at the sizes that it has.
    largest = max(r.shape for r in rates if r.dtype == dtype and r.timing is not None)
    others = {
        name: other.flops_s or 0.0
        for name in WIDTHS
        if name != dtype and (other := _best(rates, name, largest)) is not None
    }
    expected = _expected(dtype, others, vendor)
    reached = best.flops_s or 0.0
    reason = ""
    if expected is not None and reached < BEHIND * expected:
        reason = _reason(dtype, reached, others.get("fp32", 0.0), chip, samples)
    note = next((r.note for r in rates if r.dtype == dtype and r.note), "")
    return Ceiling(dtype, best, vendor.get(dtype), expected, reason, note)


def _best(rates: Sequence[Rate], dtype: str, largest: tuple[int, ...] | None = None) -> Rate | None:
    done = [
        r
        for r in rates
        if r.dtype == dtype and r.timing is not None and (largest is None or r.shape <= largest)
    ]
    return max(done, key=lambda r: r.flops_s or 0.0, default=None)


def _expected(dtype: str, others: Mapping[str, float], vendor: Mapping[str, float]) -> float | None:
    """Operations a second that the rates of the other dtypes let one expect, or None."""
    shares = [rate / vendor[name] for name, rate in others.items() if name in vendor]
    if dtype in vendor and shares:
        return vendor[dtype] * statistics.median(shares)
    if dtype == "fp64":
        return None
    as_wide = [rate for name, rate in others.items() if WIDTHS[name] >= WIDTHS[dtype]]
    return max(as_wide, default=None)


def _reason(
    dtype: str, flops_s: float, fp32_flops_s: float, chip: Chip, samples: Sequence[Sample]
) -> str:
    """Why a dtype falls behind, in one sentence: the chip has nothing that multiplies it, the TF32
    flag had no effect, or the clocks were held down while it was measured. The reason is likely,
    not proven; where nothing fits it is unknown. Both rates are of the same sizes."""
    if chip.is_cpu:
        return _reason_on_cpu(dtype, chip.cpu_flags)
    cores = chip.tensor_cores
    if cores and dtype not in VECTOR_DTYPES and cores.accelerates(dtype) is False:  # None: unknown
        where = f"capability {cores.capability}"
        return f"There is no Tensor Core path for {LABELS[dtype]} on this chip ({where})."
    if dtype == "tf32" and flops_s < NO_EFFECT * fp32_flops_s:
        return (
            "The TF32 flag had no effect: it is as fast as fp32. Look for NVIDIA_TF32_OVERRIDE=0 "
            "in the environment."
        )
    return held_down(samples) or UNKNOWN


def _reason_on_cpu(dtype: str, flags: tuple[str, ...] | None) -> str:
    label = LABELS[dtype]
    if dtype == "e4m3":
        return f"No CPU instruction that ampscope knows multiplies {label}; torch converts it."
    if dtype not in MATMUL_FLAGS:
        return UNKNOWN
    have = half_flags(flags, dtype)
    if have is None:
        return f"Unknown: whether this CPU has instructions that multiply {label} cannot be read."
    if have:
        return f"Unknown: the CPU has {have[0]}, but this torch build may not use it."
    lacking = ", ".join(MATMUL_FLAGS[dtype])
    return f"This CPU has no instruction that multiplies {label} (none of {lacking})."


def held_down(samples: Sequence[Sample]) -> str:
    """What held the clocks of a device down, by readings beside the measurement and the thresholds
    of :mod:`ampscope.analysis.telemetry`; or nothing."""
    for device, readings in by_device(samples).items():
        often = {r: share for r, share in held_back(readings).items() if share >= LEAST_SHARE}
        if often:
            named = " and ".join(f"{r} in {share:.0%} of the time" for r, share in often.items())
            name = "the CPU" if device == "cpu" else device
            return f"The clocks of {name} were held down: {named}."
    return ""


def shared(samples: Sequence[Sample]) -> str:
    """Who else used the CPU, or held memory on the GPU, meanwhile; or nothing."""
    for device, readings in by_device(samples).items():
        others = usage(readings).others_percent if device == "cpu" else None
        if others is not None and others >= OTHERS_PERCENT:
            return (
                f"Other processes used {others:.0f} % of the CPU meanwhile, so these rates are too "
                "low: measure again when it is idle."
            )
        beside = [s for s in readings if s.other_processes]
        if beside and len(beside) >= LEAST_SHARE * len(readings):
            return f"Other processes held memory on {device} meanwhile: rates may be too low."
    return ""


def low_everywhere(found: Sequence[Ceiling]) -> bool:
    """Whether the middle of the dtypes is under half of the vendor's figures: then none falls
    behind its neighbours, and something holds all of them back."""
    shares = [c.share for c in found if c.share is not None]
    return bool(shares) and statistics.median(shares) < BEHIND


def copy_rate(rates: Sequence[Rate]) -> Rate | None:
    """The copy of the largest block: no cache holds it."""
    done = [r for r in rates if r.series == COPY and r.timing is not None]
    return max(done, key=lambda r: r.moved_bytes, default=None)


@dataclass(frozen=True, slots=True)
class VendorFigures:
    """What NVIDIA or AMD print about a GPU, dense peak rates and memory bandwidth; a dtype that is
    not in ``flops_s`` is unknown."""

    names: tuple[str, ...]
    flops_s: Mapping[str, float]  # by dtype (a name of formats, "tf32", "int8"), per second
    bytes_s: float  # of the memory
    source: str  # title and address of the document


def vendor_figures(device_name: str) -> VendorFigures | None:
    """The row of a device by the name that torch and NVML give it, or None: unknown. The whole name
    must be in the table: near names are other products (A10 and A10G, RTX 4090 and RTX 4090 D), and
    the name of a MIG slice ends in its profile. Nothing is derived from neighbours.

    >>> vendor_figures("NVIDIA A100-SXM4-40GB").flops_s["bf16"]
    312000000000000.0
    >>> vendor_figures("NVIDIA A100X") is None
    True
    """
    plain = re.sub(r"^(NVIDIA|Tesla)\s+", "", re.sub(r"^NVIDIA\s+", "", device_name.strip()))
    return next((row for row in table() if plain in row.names), None)


@cache
def table() -> tuple[VendorFigures, ...]:
    """All rows, in the order of the file, which also says what its figures mean."""
    data = tomllib.loads(resources.files("ampscope.analysis").joinpath(FILE).read_text())
    return tuple(
        VendorFigures(
            names=tuple(row["names"]),
            flops_s={dtype: 1e12 * rate for dtype, rate in row["rates"].items()},
            bytes_s=1e9 * row["memory"],
            source=data["sources"][row["source"]],
        )
        for row in data["gpu"]
    )
