"""What measurements of the machine found: each record is one row of the store's ``result``.

A record is a frozen dataclass of numbers, texts, booleans, tuples and other such dataclasses. A new
kind is added to :data:`Result`; the store needs nothing else to keep it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, get_args

from ampscope.records.batches import BatchPrediction, BatchTry, LargestBatch
from ampscope.records.comparison import (
    EnergyUse,
    LossCurve,
    MemorySplit,
    ProcessPeak,
    StepTimes,
)
from ampscope.records.lessons import Call, Curve, Fates, Histogram, Reading, Tally
from ampscope.records.products import Product, StepProducts
from ampscope.records.timing import Timing


@dataclass(frozen=True, slots=True)
class Rate:
    """What one op reached on random data, alone."""

    series: str  # ceiling | copy | align_m | align_n | align_k | align_channels
    op: str  # matmul | copy | conv2d
    dtype: str  # of the inputs, a name of formats; "tf32" is fp32 tensors with TF32 switched on
    shape: tuple[int, ...]  # (m, n, k) | (elements,) | (batch, channels, height, width, filters)
    flops: int  # of one call, a multiplication and an addition counted as two
    moved_bytes: int  # of one call, each operand read and each result written once
    timing: Timing | None  # None: it cannot be done here, and ``note`` says why
    measured_at: float  # seconds since the epoch
    layout: str = ""  # NCHW | channels_last
    note: str = ""

    @property
    def flops_s(self) -> float | None:
        """Operations a second at the median."""
        return self.flops / self.timing.median_s if self.timing and self.flops else None

    @property
    def bytes_s(self) -> float | None:
        """Bytes moved a second at the median."""
        return self.moved_bytes / self.timing.median_s if self.timing else None


Result: TypeAlias = (
    Rate
    | StepTimes
    | LossCurve
    | MemorySplit
    | ProcessPeak
    | EnergyUse
    | BatchTry
    | BatchPrediction
    | LargestBatch
    | StepProducts
    | Product
    | Reading
    | Curve
    | Histogram
    | Fates
    | Tally
    | Call
)
RESULT_KINDS: tuple[type[Result], ...] = get_args(Result)
