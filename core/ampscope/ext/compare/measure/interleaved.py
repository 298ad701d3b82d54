"""Precisions side by side: the same model, batches and random state in each, interleaved.

    for each seed:
        build one training per precision, from the same weights
        for each step:
            one step in every precision, on the same batch, the first one another every time
    then, of the last seed's trainings: the share of casts, what memory is for, time at other batch
    sizes, and energy where the device has a counter

Drift (a processor that gets warm, another program that starts) falls on all precisions alike.

An untouched script is compared by :mod:`ampscope.ext.compare.measure.script_comparison`.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ampscope.control import BASELINE
from ampscope.errors import BadInput, Cancelled
from ampscope.ext.compare.measure.script_comparison import compare_script
from ampscope.measure.energy import energy_counter, energy_of, why_none
from ampscope.measure.timing import Limit
from ampscope.measure.training_steps import (
    WARM_UP,
    StepSeconds,
    Trainings,
    batch_of,
    batch_size,
    batches_of,
    cast_share,
    memory_split,
    prepared,
    step_times,
    timed_step,
)
from ampscope.records import EnergyUse, LossCurve, RunSpec
from ampscope.runner.training import ProbeTraining
from ampscope.store.writer import RunWriter

LEAST_TIMED = 2
SLOW = 5.0  # times the fastest: half-precision matmuls without an instruction for them
STEPS_SHARE = 0.6  # of the time limit, for the steps of all seeds
OTHER_SIZES = (4, 16)  # times the batch, while there is time: does a larger batch pay?
OTHER_STEPS = 3
ENERGY_S = 2.0  # in a row; NVML's counter moves every 20 to 100 ms


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Compare ``spec.precisions``; one sentence on what could not be measured."""
    if spec.control == BASELINE:
        return compare_script(spec, writer, is_cancelled, device.type == "cuda")
    limit = Limit(spec.time_limit_s)
    trainings: Trainings = {}
    taken: dict[str, list[StepSeconds]] = {name: [] for name in spec.precisions}
    plan: _Plan | None = None
    for number in range(spec.seeds):
        trainings.clear()
        gc.collect()  # the last seed's models go before the next ones come
        seeded = dataclasses.replace(spec, seed=spec.seed + number)
        trainings.update(prepared(seeded, device))
        interleaved = InterleavedTrainings(trainings, seeded, is_cancelled)
        if plan is None:
            interleaved.train(dict.fromkeys(trainings, WARM_UP))
            plan = _planned(spec, interleaved.last_s(), limit)
        for name, seen in interleaved.train(plan.steps(number)).items():
            if seen:
                taken[name] += seen[WARM_UP:]
                losses = tuple(step.loss for step in seen)
                skipped = tuple(at for at, step in enumerate(seen) if step.skipped)
                writer.add_result(LossCurve(name, seeded.seed, losses, skipped))
        writer.flush()
    assert plan is not None
    notes = list(plan.notes)
    samples = _samples(spec, next(iter(trainings.values())), notes)
    for name, seen in taken.items():
        share = cast_share(trainings[name], batch_of(trainings[name], spec))
        writer.add_result(step_times(name, samples, seen, share))
        writer.flush()
    _memory(trainings, spec, samples, writer, skipped=plan.slow)
    fast = {name: training for name, training in trainings.items() if name not in plan.slow}
    slowest = max(seen[-1].step for name, seen in taken.items() if name in fast)
    _other_sizes(fast, spec, samples, writer, limit, is_cancelled, slowest)
    notes += _energy(fast, spec, samples, writer, limit)
    return " ".join(notes)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Steps per seed in each precision; those that are far slower than the rest train once."""

    usual: int
    slow: Mapping[str, int]
    names: tuple[str, ...]
    notes: tuple[str, ...]

    def steps(self, seed: int) -> dict[str, int]:
        return {
            n: self.usual if n not in self.slow else self.slow[n] * (seed == 0) for n in self.names
        }


def _planned(spec: RunSpec, seconds: Mapping[str, float], limit: Limit) -> _Plan:
    """What fits into the steps' share of the time limit, by what the first steps took."""
    left_s = spec.time_limit_s * STEPS_SHARE - limit.gone_s()
    fastest = min(seconds.values())
    slow, notes = {}, []
    for name, step_s in seconds.items():
        if step_s > SLOW * fastest and step_s * spec.seeds * spec.steps * len(seconds) > left_s:
            steps = WARM_UP + max(int(left_s / len(seconds) / step_s) - WARM_UP, LEAST_TIMED)
            slow[name] = min(steps, spec.steps)
            notes.append(
                f"{name} takes {step_s / fastest:.0f} times as long as the fastest here: it made "
                f"{slow[name]} steps of one seed, which gives its time and not its loss."
            )
            left_s -= slow[name] * step_s
    rest_s = sum(step_s for name, step_s in seconds.items() if name not in slow)
    fits = int(left_s / max(rest_s * spec.seeds, 1e-9))
    usual = min(spec.steps, max(fits, WARM_UP + LEAST_TIMED))
    if usual < spec.steps:
        notes.append(
            f"{usual} steps per seed instead of {spec.steps:,}, to stay within the time limit of "
            f"{spec.time_limit_s:g} s."
        )
    return _Plan(usual, slow, tuple(seconds), tuple(notes))


class InterleavedTrainings:
    """The trainings of one seed, which take turns at every step."""

    def __init__(
        self, trainings: Trainings, spec: RunSpec, is_cancelled: Callable[[], bool]
    ) -> None:
        self._trainings, self._spec, self._is_cancelled = trainings, spec, is_cancelled
        self._seen: dict[str, list[StepSeconds]] = {name: [] for name in trainings}
        self._batches = {name: batches_of(training, spec) for name, training in trainings.items()}

    def last_s(self) -> dict[str, float]:
        """Time of the last step in each precision."""
        return {name: seen[-1].step for name, seen in self._seen.items() if seen}

    def train(self, steps: Mapping[str, int]) -> dict[str, list[StepSeconds]]:
        """Until every precision has made so many steps."""
        names = list(self._trainings)
        for number in range(max(steps.values())):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                if len(self._seen[name]) > number or steps[name] <= number:
                    continue
                if self._is_cancelled():
                    raise Cancelled(f"Cancelled after {number} steps.")
                training = self._trainings[name]
                batch = training.real_batch(next(self._batches[name]))
                # The same random numbers in every precision, whichever comes first.
                torch.manual_seed(self._spec.seed * 1_000_003 + number)
                self._seen[name].append(timed_step(training, batch))
        return self._seen


def _samples(spec: RunSpec, training: ProbeTraining, notes: list[str]) -> int:
    """Samples per step; 0 where the batch dimension is unknown."""
    try:
        return batch_size(batch_of(training, spec), spec.workload)
    except BadInput as error:
        notes.append(str(error))
        return 0


def _memory(
    trainings: Trainings, spec: RunSpec, samples: int, writer: RunWriter, skipped: Container[str]
) -> None:
    """At the batch itself and, where it can be enlarged, at twice that: what grows and what not.
    The second is left out for what is ``skipped``."""
    for name, training in trainings.items():
        for factor in (1, 2) if samples and name not in skipped else (1,):
            batch = batch_of(training, spec, samples * factor)
            writer.add_result(memory_split(training, batch, name, samples * factor, factor == 1))
    writer.flush()


def _other_sizes(
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


def _energy(
    trainings: Trainings, spec: RunSpec, samples: int, writer: RunWriter, limit: Limit
) -> list[str]:
    """Steps in a row in one precision: a counter is too slow for turns."""
    device = next(iter(trainings.values())).device
    found = energy_counter(device)
    if found is None:
        return [why_none(device)]
    source, read = found
    for name, training in trainings.items():
        if limit.left_s() < ENERGY_S:
            return ["There was no time to measure the energy of every precision."]
        batch = batch_of(training, spec)
        joules, steps = energy_of(partial(timed_step, training, batch), read, ENERGY_S)
        if not joules:
            writer.flush()
            return [f"Energy in {name} was not measured: its counter stands still."]
        writer.add_result(EnergyUse(name, joules, steps, samples, source, time.time()))
    writer.flush()
    return []
