"""What a search for the largest batch measures: one record a try, one a precision."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.records.timing import Timing


@dataclass(frozen=True, slots=True)
class BatchTry:
    """Some training steps with so many samples, in a process of their own."""

    precision: str
    samples: int
    fits: bool
    peak_bytes: int | None  # tensors alive at once; None where the step did not end
    device_peak: int | None  # by CUDA's allocator
    step: Timing | None
    how_it_ended: str  # one sentence when it does not fit
    measured_at: float  # seconds since the epoch

    @property
    def samples_s(self) -> float | None:
        """Throughput at the median."""
        return self.samples / self.step.median_s if self.step else None


@dataclass(frozen=True, slots=True)
class BatchPrediction:
    """What two small tries say before the search: memory = fixed + samples times so much."""

    precision: str
    fixed_bytes: int
    bytes_per_sample: int
    limit_bytes: int
    largest: int  # samples; a multiple of the search's step


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """Where the search ended: ``samples`` was seen to fit, and ``too_many``, or a size between the
    two, was seen not to. Without a ``too_many`` nothing was seen not to fit."""

    precision: str
    samples: int  # 0: not even the smallest fits
    too_many: int | None
    tries: int
