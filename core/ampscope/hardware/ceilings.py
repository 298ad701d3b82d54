"""What a machine reached in each dtype, beside the vendor's figure, and which dtypes fall behind.

    found = ceilings(rates, Chip(vendor=vendor_figures(name), tensor_cores=…, cpu_flags=None))
    found[0].dtype, found[0].flops_s, found[0].share, found[0].reason

A dtype falls behind when it reaches under half of what its neighbours suggest. Where the vendor
gives figures, these are its own figure times the share that the others reach of theirs; else the
best rate of a dtype that is as wide or wider, because narrower numbers cost no more to multiply.
fp64 has no such neighbour: many chips multiply it slowly on purpose.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampscope.hardware.capability import DTYPE_LABELS, TensorCoreInfo
from ampscope.hardware.slow_dtypes import Slow, likely_reason
from ampscope.hardware.vendor_figures import VendorFigures
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
BEHIND = 0.5  # of what the neighbours suggest
SERIES, COPY = "ceiling", "copy"


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
        """Operations a second at the median of the best size."""
        return self.best.flops_s if self.best else None

    @property
    def share(self) -> float | None:
        """Of the vendor's figure."""
        return _share(self.flops_s, self.vendor_flops_s)


def ceilings(rates: Sequence[Rate], chip: Chip, samples: Sequence[Sample] = ()) -> list[Ceiling]:
    """One a dtype that was tried, from wide to narrow; ``samples`` are readings beside the run."""
    tried = [r for r in rates if r.series == SERIES]
    vendor = dict(chip.vendor.flops_s) if chip.vendor else {}
    return [
        _ceiling(dtype, tried, vendor, chip, samples)
        for dtype in WIDTHS
        if any(r.dtype == dtype for r in tried)
    ]


def copy_rate(rates: Sequence[Rate]) -> Rate | None:
    """The copy of the largest block: no cache holds it."""
    done = [r for r in rates if r.series == COPY and r.timing is not None]
    return max(done, key=lambda r: r.moved_bytes, default=None)


def low_everywhere(found: Sequence[Ceiling]) -> bool:
    """Whether the middle of the dtypes is under half of the vendor's figures: then none falls
    behind its neighbours, and something holds all of them back."""
    shares = [c.share for c in found if c.share is not None]
    return bool(shares) and statistics.median(shares) < BEHIND


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
    expected = suggested(dtype, others, vendor)
    reached = best.flops_s or 0.0
    reason = ""
    if expected is not None and reached < BEHIND * expected:
        slow = Slow(dtype, reached, others.get("fp32"))
        reason = likely_reason(slow, chip.tensor_cores, chip.cpu_flags, chip.is_cpu, samples)
    note = next((r.note for r in rates if r.dtype == dtype and r.note), "")
    return Ceiling(dtype, best, vendor.get(dtype), expected, reason, note)


def suggested(dtype: str, others: Mapping[str, float], vendor: Mapping[str, float]) -> float | None:
    """Operations a second that the rates of the other dtypes let one expect, or None."""
    shares = [rate / vendor[name] for name, rate in others.items() if name in vendor]
    if dtype in vendor and shares:
        return vendor[dtype] * statistics.median(shares)
    if dtype == "fp64":
        return None
    as_wide = [rate for name, rate in others.items() if WIDTHS[name] >= WIDTHS[dtype]]
    return max(as_wide, default=None)


def _best(rates: Sequence[Rate], dtype: str, largest: tuple[int, ...] | None = None) -> Rate | None:
    done = [
        r
        for r in rates
        if r.dtype == dtype and r.timing is not None and (largest is None or r.shape <= largest)
    ]
    return max(done, key=lambda r: r.flops_s or 0.0, default=None)


def _share(reached: float | None, figure: float | None) -> float | None:
    return reached / figure if reached is not None and figure else None
