"""What a comparison of precisions measures, one record a precision and seed."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.records.timing import Timing


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Time of training steps in one precision, turn and turn about with the others.

    The phases are the default step's; a workload with a step of its own has none. On CUDA the
    phases are the device's time between events, and ``step`` is the host's clock around it all.
    """

    precision: str
    samples: int  # a step
    step: Timing
    forward: Timing | None
    backward: Timing | None
    optimizer: Timing | None  # unscale_, step and update
    cast_share: float | None  # of a profiled step's op time, 0 … 1
    measured_at: float  # seconds since the epoch
    is_base: bool = True  # the batch as the workload gives it, or as it was asked for

    @property
    def samples_s(self) -> float:
        """Throughput at the median."""
        return self.samples / self.step.median_s


@dataclass(frozen=True, slots=True)
class LossCurve:
    """Loss of every step, the same batches and random state in all precisions of a seed."""

    precision: str
    seed: int
    losses: tuple[float, ...]
    skipped: tuple[int, ...]  # steps that GradScaler left out


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Bytes of tensors that live when a step needs most, by what they are for.

    Every storage that an op allocates is followed until it is freed. ``device_peak`` is what the
    allocator itself says of the same step (CUDA); it also holds workspaces of libraries.
    """

    precision: str
    samples: int
    weights: int  # parameters and buffers
    gradients: int
    optimizer_state: int
    activations: int  # made in the forward pass and still alive
    cast_copies: int  # of these, copies in another floating-point dtype
    temporaries: int  # made in the backward pass or the optimizer's step
    inputs: int  # the batch
    device_peak: int | None
    measured_at: float
    is_base: bool = True

    @property
    def peak(self) -> int:
        """All of it."""
        parts = (self.weights, self.gradients, self.optimizer_state, self.activations)
        return sum((*parts, self.cast_copies, self.temporaries, self.inputs))


@dataclass(frozen=True, slots=True)
class ProcessPeak:
    """Peak memory of a whole run of a script, which cannot be split."""

    precision: str
    peak_bytes: int
    what: str  # "CUDA's allocator" | "the process above Python and torch"
    measured_at: float


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Energy of some steps in a row, by a counter of the device."""

    precision: str
    joules: float
    steps: int
    samples: int  # a step
    source: str  # "NVML total energy" | "RAPL, package 0"
    measured_at: float
