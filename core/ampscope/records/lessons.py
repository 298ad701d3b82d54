"""What a lesson's measurement found: named numbers, curves, histograms and counts.

Fourteen lessons share these records: a lesson is told by its run's spec, and what a record means by
its ``name`` and ``series``, which the lesson's own two files (measurement and page) agree upon.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """One measured number. ``value`` may be NaN or infinite: lessons are about such numbers."""

    name: str  # what was measured, "lost share"
    series: str  # in which case, "fp16"
    value: float
    text: str = ""  # what a number cannot say


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured numbers in order."""

    name: str  # "loss"
    series: str  # "model.half()"
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """An exponent histogram: a raw row of :mod:`ampscope.exponents`."""

    name: str  # "grad_output"
    series: str
    dtype: str  # of the tensors that were counted
    row: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fates:
    """What became of the elements of half-precision gradients, told by the fp32 reference: three
    kinds of small, never one, and overflow. The counts are of the same ``total``."""

    series: str
    scale: float  # the loss scale of this pass
    total: int
    lost: int  # zero in half, not in fp32
    subnormal: int  # subnormal in half
    zero_before: int  # zero in both
    nonfinite: int  # NaN or Inf in half, finite in fp32


@dataclass(frozen=True, slots=True)
class Tally:
    """What a tensor held at one place of a step."""

    series: str
    step: int
    place: str  # "softmax"
    phase: str  # forward | backward | weights
    total: int
    nan: int
    inf: int
    largest: float  # magnitude of the finite elements; 0 where there is none


@dataclass(frozen=True, slots=True)
class Call:
    """Calls of one op with the same dtypes in a step."""

    op: str  # "mm", without its namespace
    phase: str  # forward | backward
    inputs: str  # "fp16,fp16"
    outputs: str
    count: int
