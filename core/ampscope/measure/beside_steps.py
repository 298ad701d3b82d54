"""What is measured beside the steps of a comparison: memory, other batch sizes, energy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Container

import torch

from ampscope.measure.energy import energy_counter
from ampscope.measure.live_bytes import LiveBytes
from ampscope.measure.phases import StepSeconds, timed_step
from ampscope.measure.timing import summary
from ampscope.measure.together import Trainings, batch_of
from ampscope.records import EnergyUse, MemorySplit, RunSpec, StepTimes
from ampscope.run.training import Training, training_step
from ampscope.store.writer import RunWriter
from ampscope.workloads.protocol import Batch

OTHER_SIZES = (4, 16)  # times the batch, while there is time: does a larger batch pay?
OTHER_STEPS = 3
ENERGY_S = 2.0  # in a row; NVML's counter moves every 20 to 100 ms
USABLE_SHARE = 0.9  # of the time limit; what ends at it has lost its results


class Limit:
    """The time limit, of which a little is left over for the end."""

    def __init__(self, limit_s: float) -> None:
        self._began = time.monotonic()
        self._limit_s = limit_s * USABLE_SHARE

    def gone_s(self) -> float:
        """Since the measurement began."""
        return time.monotonic() - self._began

    def left_s(self) -> float:
        """Negative when it has passed."""
        return self._limit_s - self.gone_s()


def step_times(
    name: str, samples: int, seen: list[StepSeconds], share: float | None, *, is_base: bool = True
) -> StepTimes:
    """Medians and quartiles over steps."""
    phases = list(zip(*(s.phases for s in seen if s.phases is not None), strict=True))
    forward, backward, optimizer = map(summary, phases) if phases else (None, None, None)
    step = summary([s.step for s in seen])
    return StepTimes(name, samples, step, forward, backward, optimizer, share, time.time(), is_base)


def memory(
    trainings: Trainings, spec: RunSpec, samples: int, writer: RunWriter, skipped: Container[str]
) -> None:
    """At the batch itself and, where it can be enlarged, at twice that: what grows and what not.
    The second is left out for what is ``skipped``."""
    for name, training in trainings.items():
        for factor in (1, 2) if samples and name not in skipped else (1,):
            batch = batch_of(training, spec, samples * factor)
            writer.add_result(memory_split(training, batch, name, samples * factor, factor == 1))
    writer.flush()


def memory_split(
    training: Training, batch: Batch, name: str, samples: int, is_base: bool = True
) -> MemorySplit:
    """Of one step, whose gradients are made anew."""
    device, peak = training.device, None
    training.optimizer.zero_grad(set_to_none=True)
    with LiveBytes(training.model, training.optimizer, batch) as live:
        own, others = live.peak, 0
        if device.type == "cuda":  # the other precisions' models are on the device as well
            others = torch.cuda.memory_allocated(device) - own
            torch.cuda.reset_peak_memory_stats(device)
        training_step(training, batch)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - others
    return MemorySplit(
        name, samples, **live.at_peak, device_peak=peak, measured_at=time.time(), is_base=is_base
    )


def other_sizes(
    trainings: Trainings, spec: RunSpec, samples: int, writer: RunWriter, limit: Limit,
    is_cancelled: Callable[[], bool], slowest_s: float,
) -> None:  # fmt: skip
    """Time at larger batches, while there is time: where AMP begins to pay, or stops to."""
    for factor in OTHER_SIZES if samples else ():
        rounds = len(trainings) * (OTHER_STEPS + 1)
        if is_cancelled() or limit.left_s() < rounds * slowest_s * factor:
            return
        seen: dict[str, list[StepSeconds]] = {name: [] for name in trainings}
        batches = {n: batch_of(t, spec, samples * factor) for n, t in trainings.items()}
        for number, (name, training) in itertools.product(
            range(OTHER_STEPS + 1), trainings.items()
        ):
            try:
                step = timed_step(training, batches[name])
            except (MemoryError, torch.OutOfMemoryError):
                return
            if number:  # the first chooses kernels
                seen[name].append(step)
            if limit.left_s() < 0:
                return
        for name, steps in seen.items():
            writer.add_result(step_times(name, samples * factor, steps, None, is_base=False))
        writer.flush()


def energy(
    trainings: Trainings, spec: RunSpec, samples: int, writer: RunWriter, limit: Limit
) -> list[str]:
    """Steps in a row in one precision: a counter is too slow for turns."""
    found = energy_counter(next(iter(trainings.values())).device)
    if found is None:
        return ["Energy was not measured: no counter that may be read here."]
    source, read = found
    for name, training in trainings.items():
        if limit.left_s() < ENERGY_S:
            return ["There was no time to measure the energy of every precision."]
        batch = batch_of(training, spec)
        count, before, began = 0, read(), time.monotonic()
        while time.monotonic() - began < ENERGY_S:
            timed_step(training, batch)
            count += 1
        writer.add_result(EnergyUse(name, read() - before, count, samples, source, time.time()))
    writer.flush()
    return []
