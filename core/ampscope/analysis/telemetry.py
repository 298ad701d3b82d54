"""What a machine's readings say about the run beside which they were taken.

    used = usage([s for s in samples if s.device == "cpu"])
    used.busy_percent, used.others_percent        96.2, 12.0
    spoiled(samples)                              ("The CPU was shared: …",) or nothing

A share that a reading holds is of the time since the reading before, so means are weighted with
that time. :func:`spoiled` is for comparisons: what made two of their times differ that has nothing
to do with what is compared.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampscope.control import BASELINE
from ampscope.records import RunSpec, Sample, StepRecord

# Reasons for which a clock is lower than the device could at that moment, in the words of
# hardware.gpu.CLOCK_REASONS and telemetry.cpu_sensors. The others (application clocks, sync boost,
# display) are settings, the same for everything that is compared.
HELD_BACK = (
    "power cap",
    "power brake",
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "CPU quota",
)
# Clocks fall by some tenths when they are held back: in a twentieth of the time that moves a mean
# by one or two percent, which is what a comparison can tell apart.
LEAST_SHARE = 0.05
# Others' share of the CPU. torch uses all its cores at once and waits for the slowest, so a tenth
# that is gone can cost a tenth; below it lie the system's own work and the readings' 10 ms ticks.
OTHERS_PERCENT = 10.0
OTHERS_BESIDE_CHILDREN = 25.0
LEAST_S = 1.0  # ten readings; fewer say nothing about a share of time
LONGEST_GAP_S = 60.0  # between readings of a long run; a longer one is a machine that slept


@dataclass(frozen=True, slots=True)
class Usage:
    """Readings of one device, summed up; None is "was not read"."""

    device: str
    readings: int
    seconds: float
    busy_percent: float | None  # mean
    own_percent: float | None  # mean; of the CPU, the run's own processes
    memory_bytes: int | None  # most, by all processes
    own_memory_bytes: int | None  # most
    power_w: float | None  # mean
    energy_j: float | None  # of the whole time
    temperature_c: float | None  # highest
    clock_mhz: float | None  # mean
    clock_range_mhz: tuple[float, float] | None

    @property
    def others_percent(self) -> float | None:
        """Share of the CPU that other processes took."""
        if self.busy_percent is None or self.own_percent is None:
            return None
        return max(0.0, self.busy_percent - self.own_percent)


def by_device(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """GPUs first, the CPU last."""
    devices = sorted({s.device for s in samples}, key=lambda name: (name == "cpu", name))
    return {name: [s for s in samples if s.device == name] for name in devices}


def within(samples: Sequence[Sample], begin: float, end: float) -> list[Sample]:
    """Readings of a part of a run; both in seconds since the epoch."""
    return [s for s in samples if begin <= s.at <= end]


def steps_at(samples: Sequence[Sample], steps: Sequence[StepRecord]) -> list[int | None]:
    """The step under way at each reading; None before the first, after the last, and where no step
    has a time. Between steps that are not next to each other it is estimated."""
    timed = [(s.ended_at, s.step, s.step_time_s) for s in steps if s.ended_at is not None]
    if not timed:
        return [None] * len(samples)
    ends = [end for end, _, _ in timed]
    begin = ends[0] - (timed[0][2] or 0.0)
    return [
        None if not begin <= s.at <= ends[-1] else _step_at(s.at, ends, [n for _, n, _ in timed])
        for s in samples
    ]


def _step_at(at: float, ends: Sequence[float], numbers: Sequence[int]) -> int:
    place = bisect.bisect_left(ends, at)
    if place == 0 or numbers[place] - numbers[place - 1] == 1:
        return numbers[place]
    share = (at - ends[place - 1]) / (ends[place] - ends[place - 1])
    return numbers[place - 1] + round(share * (numbers[place] - numbers[place - 1]))


def usage(samples: Sequence[Sample]) -> Usage:
    """Sum up one device's readings, in the order of time; at least one."""
    clocks = [s.clock_mhz for s in samples if s.clock_mhz is not None]
    energies = [s.energy_j for s in samples if s.energy_j is not None]
    return Usage(
        device=samples[0].device,
        readings=len(samples),
        seconds=sum(_gaps(samples)),
        busy_percent=_mean(samples, lambda s: s.busy_percent),
        own_percent=_mean(samples, lambda s: s.own_percent),
        memory_bytes=max((s.memory_used_bytes or 0 for s in samples), default=0) or None,
        own_memory_bytes=max((s.own_memory_bytes or 0 for s in samples), default=0) or None,
        power_w=_mean(samples, lambda s: s.power_w),
        energy_j=energies[-1] - energies[0] if len(energies) > 1 else None,
        temperature_c=max((s.temperature_c for s in samples if s.temperature_c), default=None),
        clock_mhz=_mean(samples, lambda s: s.clock_mhz),
        clock_range_mhz=(min(clocks), max(clocks)) if clocks else None,
    )


def _gaps(samples: Sequence[Sample]) -> list[float]:
    """How long each reading speaks for: the time since the one before."""
    times = [s.at for s in samples]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return [0.0, *(min(gap, LONGEST_GAP_S) for gap in gaps)] if times else []


def _mean(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    """Over the time for which the value is known."""
    pairs = [
        (gap, known)
        for gap, s in zip(_gaps(samples), samples, strict=True)
        if gap > 0 and (known := value(s)) is not None
    ]
    whole = sum(gap for gap, _ in pairs)
    return sum(gap * known for gap, known in pairs) / whole if whole else None


def _share(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> float:
    whole = sum(_gaps(samples))
    held = sum(gap for gap, s in zip(_gaps(samples), samples, strict=True) if holds(s))
    return held / whole if whole else 0.0


def held_back(samples: Sequence[Sample]) -> dict[str, float]:
    """Reasons that held one device's clocks down, with their share of the time, the largest first.
    Only reasons of :data:`HELD_BACK`."""
    shares = {
        reason: _share(samples, lambda s, reason=reason: reason in s.clock_reasons.split(","))  # type: ignore[misc]  # a default of a lambda
        for reason in HELD_BACK
    }
    found = [(share, reason) for reason, share in shares.items() if share > 0]
    return {reason: share for share, reason in sorted(found, reverse=True)}


def spoiled(samples: Sequence[Sample], others_percent: float = OTHERS_PERCENT) -> tuple[str, ...]:
    """One sentence for each thing that makes times of this run doubtful; none is good."""
    found: list[str] = []
    for device, own in by_device(samples).items():
        if sum(_gaps(own)) < LEAST_S:
            continue
        name = "The CPU" if device == "cpu" else device
        found += _throttled(name, own)
        found += _loaded(own, others_percent) if device == "cpu" else _shared(name, own)
    return tuple(found)


def others_bound(spec: RunSpec) -> float:
    """Percent of the CPU from which others count. A batch search and a script's comparison work in
    children of seconds each, of which the first second counts as another process's."""
    is_in_children = spec.kind == "batch" or (spec.kind == "compare" and spec.control == BASELINE)
    return OTHERS_BESIDE_CHILDREN if is_in_children else OTHERS_PERCENT


def _throttled(name: str, samples: Sequence[Sample]) -> list[str]:
    reasons = {r: share for r, share in held_back(samples).items() if share >= LEAST_SHARE}
    if not reasons:
        return []
    parts = [f"{reason} in {100 * share:.1f} % of the time" for reason, share in reasons.items()]
    clocks = usage(samples).clock_range_mhz
    range_ = f" (clock {clocks[0]:,.0f} to {clocks[1]:,.0f} MHz)" if clocks else ""
    return [f"{name} was held back: {', '.join(parts)}{range_}."]


def _shared(name: str, samples: Sequence[Sample]) -> list[str]:
    """Other processes with memory on a GPU: each has its own kernels, of which nothing is known."""
    share = _share(samples, lambda s: bool(s.other_processes))
    if share < LEAST_SHARE:
        return []
    most = max(s.other_processes or 0 for s in samples)
    who = f"{most} other process" + ("es" if most > 1 else "")
    beside = [
        s.memory_used_bytes - s.own_memory_bytes
        for s in samples
        if s.other_processes and s.memory_used_bytes is not None and s.own_memory_bytes is not None
    ]
    memory = f", up to {max(beside) / 2**20:,.0f} MiB beside the run's own" if beside else ""
    return [
        f"{name} was shared: {who} held memory on it in {100 * share:.1f} % of the time{memory}."
    ]


def _loaded(samples: Sequence[Sample], bound: float) -> list[str]:
    used = usage(samples)
    others = used.others_percent
    if others is None or others < bound:
        return []
    return [
        f"The CPU was shared: other processes took {others:.1f} % of it, the run "
        f"{used.own_percent:.1f} %."
    ]
