"""The results of one comparison by precision: ratios between two of them, the figures as texts, and
whether losses differ by more than seeds do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from ampscope.number_words import binary_size, seconds
from ampscope.records import (
    EnergyUse,
    LossCurve,
    MemorySplit,
    ProcessPeak,
    Result,
    StepTimes,
)
from ampscope.story.result_tables import quartiles

BASES = ("fp32", "tf32")  # what the others are compared with, where it was measured


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians, with what the quartiles make of it at the worst and at the best."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PrecisionResults:
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


def by_precision(results: Iterable[Result]) -> tuple[PrecisionResults, ...]:
    """In the order in which they were asked for."""
    found = list(results)
    names = dict.fromkeys(r.precision for r in found if isinstance(r, LossCurve | StepTimes))
    return tuple(_measured(name, found) for name in names)


def base_of(measured: Sequence[PrecisionResults]) -> PrecisionResults | None:
    """fp32, else TF32, else the first."""
    named = {m.precision: m for m in measured}
    first = measured[0] if measured else None
    return next((named[name] for name in BASES if name in named), first)


def speedup(base: StepTimes, other: StepTimes) -> Ratio:
    """How many times as fast ``other`` is."""
    a, b = base.step, other.step
    return Ratio(a.median_s / b.median_s, a.low_s / b.high_s, a.high_s / b.low_s)


def memory_ratio(base: PrecisionResults, other: PrecisionResults) -> float | None:
    """Peak of ``other`` over that of ``base``."""
    peaks = [peak_bytes(m) for m in (base, other)]
    return peaks[1] / peaks[0] if peaks[0] and peaks[1] else None


def peak_bytes(measured: PrecisionResults) -> int | None:
    """By the allocator where it was asked, else the sum of tensors; of a script its process."""
    if measured.memory is not None:
        return measured.memory.device_peak or measured.memory.peak
    return measured.process.peak_bytes if measured.process else None


def joules_a_step(measured: PrecisionResults) -> float | None:
    """Energy of one step; None where no counter was read."""
    return measured.energy.joules / measured.energy.steps if measured.energy else None


def cost_per_million(times: StepTimes, price_per_hour: float) -> float | None:
    """What a million samples cost at a machine's price; None where samples cannot be counted."""
    return price_per_hour / 3600 / times.samples_s * 1e6 if times.samples else None


def _measured(name: str, results: Sequence[Result]) -> PrecisionResults:
    times = [r for r in results if isinstance(r, StepTimes) and r.precision == name]
    memory = [r for r in results if isinstance(r, MemorySplit) and r.precision == name]
    energy = [r for r in results if isinstance(r, EnergyUse) and r.precision == name]
    curves = [r for r in results if isinstance(r, LossCurve) and r.precision == name]
    others = sorted((t for t in times if not t.is_base), key=lambda t: t.samples)
    return PrecisionResults(
        name,
        next((t for t in times if t.is_base), None),
        tuple(others),
        next((m for m in memory if m.is_base), None),
        next((m for m in memory if not m.is_base), None),
        tuple(curves),
        energy[0] if energy else None,
        next((r for r in results if isinstance(r, ProcessPeak) and r.precision == name), None),
    )


Cell: TypeAlias = Callable[[PrecisionResults], str]  # "" where it was not measured


def figure_rows(
    measured: Sequence[PrecisionResults], price: float = 0.0
) -> list[tuple[str, list[str]]]:
    """(label, text of each precision) of everything that was measured, the same in a terminal and
    on a page; ``price`` is the machine's an hour, 0 for none."""
    base = base_of(measured)
    rows = [(label, [cell(m) for m in measured]) for label, cell in _figures(base, price)]
    return [(label, cells) for label, cells in rows if any(cells)]


def _figures(base: PrecisionResults | None, price: float) -> tuple[tuple[str, Cell], ...]:
    return (
        ("time per step, median", lambda m: _of(m.times, lambda t: seconds(t.step.median_s))),
        ("quartiles", lambda m: _of(m.times, lambda t: quartiles(t.step))),
        (f"speed against {base.precision if base else 'fp32'}", partial(_speed, base)),
        (
            "samples per second",
            lambda m: f"{m.times.samples_s:,.0f}" if m.times and m.times.samples else "",
        ),
        ("forward / backward / optimizer", lambda m: _of(m.times, _phases)),
        ("casts, of the time in ops", lambda m: _of(m.times, _casts)),
        (_peak_label(base), lambda m: _of(peak_bytes(m), binary_size)),
        ("against the base", partial(_memory, base)),
        ("activations at the peak", lambda m: _of(m.memory, lambda s: binary_size(s.activations))),
        ("cast copies at the peak", lambda m: _of(m.memory, lambda s: binary_size(s.cast_copies))),
        ("weights and optimizer state", lambda m: _of(m.memory, lambda s: binary_size(s.fixed))),
        ("loss, last third", _loss),
        ("steps left out by GradScaler", lambda m: str(m.skips) if m.curves else ""),
        ("energy per step, idle too", _energy),
        ("a million samples cost", partial(_cost, price)),
    )


def _of(value: object, text: Callable[..., str]) -> str:
    return "" if value is None else text(value)


def _phases(times: StepTimes) -> str:
    if not (times.forward and times.backward and times.optimizer):
        return ""
    parts = [times.forward.median_s, times.backward.median_s, times.optimizer.median_s]
    return " / ".join(f"{part / sum(parts):.0%}" for part in parts)


def _casts(times: StepTimes) -> str:
    return "" if times.cast_share is None else f"{times.cast_share:.0%}"


def _speed(base: PrecisionResults | None, m: PrecisionResults) -> str:
    if base is None or base.times is None or m.times is None:
        return ""
    return f"{speedup(base.times, m.times).value:.2f}×"


def _memory(base: PrecisionResults | None, m: PrecisionResults) -> str:
    ratio = None if base is None else memory_ratio(base, m)
    return "" if ratio is None else f"{ratio:.0%}"


def _loss(m: PrecisionResults) -> str:
    losses = [final_loss(curve) for curve in m.curves]
    return f"{sum(losses) / len(losses):.4g}" if losses else ""


def _energy(m: PrecisionResults) -> str:
    joules = joules_a_step(m)
    return "" if joules is None else f"{joules:.3g} J"


def _cost(price: float, m: PrecisionResults) -> str:
    cost = cost_per_million(m.times, price) if price and m.times else None
    return "" if cost is None else f"{cost:.4g}"


def _peak_label(base: PrecisionResults | None) -> str:
    """Of a script it is the whole process that is measured."""
    return f"peak memory, {base.process.what}" if base and base.process else "peak memory"


class LossChange(StrEnum):
    """What can be said about a precision's loss beside the base's."""

    SAME = "same"  # within what seeds do
    DIFFERENT = "different"
    DIVERGED = "diverged"  # not finite at the end, where the base is
    UNKNOWN = "unknown"  # one seed, too few steps, or the base itself is not finite


@dataclass(frozen=True, slots=True)
class LossDifference:
    """``gap`` is the mean over seeds of (loss - base's loss); ``noise`` the range of the base's
    losses over seeds; both over the last third of the steps."""

    change: LossChange
    gap: float | None
    noise: float | None
    first_nonfinite: int | None = None  # step, of the first seed in which there was one
    why: str = ""  # it is unknown


def final_loss(curve: LossCurve) -> float:
    """Mean over the last third; NaN and infinities stay what they are, and no losses have NaN."""
    last = curve.losses[-max(1, len(curve.losses) // 3) :]
    return sum(last) / len(last) if last else math.nan


def loss_difference(base: PrecisionResults, other: PrecisionResults) -> LossDifference:
    """Whether the losses of two precisions differ by more than seeds do. Both had the same batches
    and random state under each seed, so their gap is taken seed by seed and then averaged; the
    yardstick is how far the base's seeds lie apart."""
    bases = {c.seed: final_loss(c) for c in base.curves}
    others = {c.seed: final_loss(c) for c in other.curves}
    pairs = [(bases[seed], others[seed]) for seed in bases if seed in others]
    if not pairs:
        return _unknown("no losses were recorded")
    if not all(math.isfinite(b) for b, _ in pairs):
        step = _first_nonfinite(base)
        return _unknown(f"{base.precision} itself is not finite at the end", first=step)
    if not all(math.isfinite(o) for _, o in pairs):
        return LossDifference(LossChange.DIVERGED, None, None, _first_nonfinite(other))
    if _made_fewer_steps(base, other):
        return _unknown("it made fewer steps, because it is so slow here")
    gap = sum(o - b for b, o in pairs) / len(pairs)
    if len(pairs) < 2:
        return _unknown("one seed is no yardstick", gap)
    noise = max(b for b, _ in pairs) - min(b for b, _ in pairs)
    if not noise:
        return _unknown("every seed made the same run: the script seeds itself", gap, noise)
    change = LossChange.SAME if abs(gap) <= noise else LossChange.DIFFERENT
    return LossDifference(change, gap, noise)


def _unknown(
    why: str, gap: float | None = None, noise: float | None = None, first: int | None = None
) -> LossDifference:
    return LossDifference(LossChange.UNKNOWN, gap, noise, first, why)


def _made_fewer_steps(base: PrecisionResults, other: PrecisionResults) -> bool:
    """So slow here that it was not trained as long."""
    lengths = {c.seed: len(c.losses) for c in base.curves}
    return any(len(c.losses) < lengths.get(c.seed, 0) for c in other.curves)


def _first_nonfinite(measured: PrecisionResults) -> int | None:
    for curve in measured.curves:
        for step, loss in enumerate(curve.losses):
            if not math.isfinite(loss):
                return step
    return None
