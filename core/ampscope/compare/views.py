"""The results of one comparison by precision, and the ratios between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampscope.records import EnergyUse, LossCurve, MemorySplit, ProcessPeak, Result, StepTimes

BASES = ("fp32", "tf32")  # what the others are compared with, where it was measured


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians, with what the quartiles make of it at the worst and at the best."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was measured of one precision."""

    precision: str
    times: StepTimes | None
    other_times: tuple[StepTimes, ...]  # at other batch sizes, the smallest first
    memory: MemorySplit | None
    other_memory: MemorySplit | None  # at twice the batch
    curves: tuple[LossCurve, ...]
    energy: EnergyUse | None
    process: ProcessPeak | None  # of a script, which has no split

    @property
    def skips(self) -> int:
        """Steps that GradScaler left out, of all seeds."""
        return sum(len(curve.skipped) for curve in self.curves)

    def times_at(self, samples: int) -> StepTimes | None:
        """Of a step with so many samples."""
        every = (*((self.times,) if self.times else ()), *self.other_times)
        return next((t for t in every if t.samples == samples), None)


def by_precision(results: Iterable[Result]) -> tuple[Measured, ...]:
    """In the order in which they were asked for."""
    found = list(results)
    names = dict.fromkeys(r.precision for r in found if isinstance(r, LossCurve | StepTimes))
    return tuple(_measured(name, found) for name in names)


def base_of(measured: Sequence[Measured]) -> Measured | None:
    """fp32, else TF32, else the first."""
    named = {m.precision: m for m in measured}
    first = measured[0] if measured else None
    return next((named[name] for name in BASES if name in named), first)


def speedup(base: StepTimes, other: StepTimes) -> Ratio:
    """How many times as fast ``other`` is."""
    a, b = base.step, other.step
    return Ratio(a.median_s / b.median_s, a.low_s / b.high_s, a.high_s / b.low_s)


def memory_ratio(base: Measured, other: Measured) -> float | None:
    """Peak of ``other`` over that of ``base``."""
    peaks = [peak_bytes(m) for m in (base, other)]
    return peaks[1] / peaks[0] if peaks[0] and peaks[1] else None


def peak_bytes(measured: Measured) -> int | None:
    """By the allocator where it was asked, else the sum of tensors; of a script its process."""
    if measured.memory is not None:
        return measured.memory.device_peak or measured.memory.peak
    return measured.process.peak_bytes if measured.process else None


def joules_a_step(measured: Measured) -> float | None:
    """Energy of one step; None where no counter was read."""
    return measured.energy.joules / measured.energy.steps if measured.energy else None


def cost_per_million(times: StepTimes, price_per_hour: float) -> float | None:
    """What a million samples cost at a machine's price; None where samples cannot be counted."""
    return price_per_hour / 3600 / times.samples_s * 1e6 if times.samples else None


def _measured(name: str, results: Sequence[Result]) -> Measured:
    times = [r for r in results if isinstance(r, StepTimes) and r.precision == name]
    memory = [r for r in results if isinstance(r, MemorySplit) and r.precision == name]
    energy = [r for r in results if isinstance(r, EnergyUse) and r.precision == name]
    curves = [r for r in results if isinstance(r, LossCurve) and r.precision == name]
    others = sorted((t for t in times if not t.is_base), key=lambda t: t.samples)
    return Measured(
        name,
        next((t for t in times if t.is_base), None),
        tuple(others),
        next((m for m in memory if m.is_base), None),
        next((m for m in memory if not m.is_base), None),
        tuple(curves),
        energy[0] if energy else None,
        next((r for r in results if isinstance(r, ProcessPeak) and r.precision == name), None),
    )
