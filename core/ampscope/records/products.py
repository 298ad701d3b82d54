"""The products of one training step: matrix products, convolutions, attention, and what each
reached when it was run alone.

A step's equal products are one record with several places. First comes one :class:`StepProducts`
(how many there are), then one :class:`Product` each as it is measured::

    Product(op="aten.addmm", part="", dtype="bf16", operands=(bias, x, weight),
            dimensions=(Dimension("m", 1024), Dimension("n", 96), Dimension("k", 256)),
            places=(Place("head", "forward", 1),), …)
"""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.records.timing import Timing


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor that a product reads: sizes and distances in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # a name of formats


@dataclass(frozen=True, slots=True)
class Dimension:
    """One of the sizes that decide how well a product fits the hardware's tiles."""

    name: str  # m | n | k | input channels | output channels | head size
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the step a product runs."""

    module: str  # path; empty for the model itself and what runs in no module
    phase: str  # forward | backward | optimizer
    count: int  # times a step


@dataclass(frozen=True, slots=True)
class Padded:
    """The same product with some dimensions enlarged, measured."""

    changes: tuple[tuple[int, int], ...]  # (size, padded size) of each dimension that was enlarged
    flops: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class Product:
    """One product of the step, alone, on random data of the same shapes, dtypes and strides."""

    op: str  # "aten.addmm"
    part: str  # of a convolution's backward: "input gradient" | "weight gradient"; else empty
    dtype: str  # computed in; "tf32" is fp32 tensors with TF32 switched on
    operands: tuple[Operand, ...]
    dimensions: tuple[Dimension, ...]
    flops: int  # of one call, a multiplication and an addition counted as two
    moved_bytes: int  # of one call, each operand read and each result written once
    places: tuple[Place, ...]
    kernels: tuple[str, ...]  # names seen in the step itself, a CPU's from oneDNN's log
    measured_at: float  # seconds since the epoch
    timing: Timing | None  # None: it could not be run alone, and ``note`` says why
    control: Timing | None  # the same shapes in fp32 without TF32; None where there is none
    padded: tuple[Padded, ...] = ()
    note: str = ""

    @property
    def count(self) -> int:
        """Calls a step."""
        return sum(place.count for place in self.places)

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / max(1, self.moved_bytes)

    @property
    def flops_s(self) -> float | None:
        """Operations a second at the median."""
        return self.flops / self.timing.median_s if self.timing else None


@dataclass(frozen=True, slots=True)
class StepProducts:
    """The step as a whole, and what of the device decides which products fit."""

    device: str  # cpu | cuda | rocm
    capability: str  # "9.0"; CUDA alone has one
    cpu_flags: tuple[str, ...] | None  # of hardware.cpu; None on a GPU and where unreadable
    calls: int
    flops: int
    distinct: int  # so many Product records follow
    kernel_source: str  # torch.profiler | oneDNN | none
