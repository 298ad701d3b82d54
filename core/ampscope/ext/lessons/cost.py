"""Lesson 14: throughput of a training step in fp32 and bf16, and energy where a counter is read.

What a whole training costs follows from samples per second; prices and, without a counter, watts
are the learner's to type in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.measure.energy import energy_counter, energy_of
from ampscope.measure.training_steps import (
    StepSeconds,
    batch_of,
    batch_size,
    prepared,
    step_times,
    timed_step,
)
from ampscope.records import EnergyUse, Result, RunSpec

INFO = LessonInfo(
    id="cost",
    number=14,
    title="What it costs",
    icon="payments",
    sentence="Energy and money for a whole training, from the throughput measured here.",
    settings={"model": ("gpt", "lenet", "mlp")},
    is_speed=True,
)
PRECISIONS = "fp32,bf16"
WARM_UP, LEAST, TIMED_S = 3, 5, 1.2
ENERGY_S = 0.6  # in a row, for each precision


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """StepTimes of both, EnergyUse of both where it can be read."""
    spec = RunSpec(workload=asked["model"], precision=PRECISIONS, policy="native")
    trainings = prepared(spec, device)
    batches = {name: batch_of(training, spec) for name, training in trainings.items()}
    samples = batch_size(next(iter(batches.values())), spec.workload)
    seen: dict[str, list[StepSeconds]] = {name: [] for name in trainings}
    ends, number = time.perf_counter() + 10 * TIMED_S, 0
    while number < WARM_UP + LEAST or time.perf_counter() < ends:
        if number == WARM_UP:
            ends = time.perf_counter() + TIMED_S
        for name, training in trainings.items():
            one = timed_step(training, batches[name])
            if number >= WARM_UP:
                seen[name].append(one)
        number += 1
    for name, taken in seen.items():
        yield step_times(name, samples, taken, None)
    counter = energy_counter(device)
    if counter is None:
        return
    source, read = counter
    for name, training in trainings.items():
        joules, steps = energy_of(partial(timed_step, training, batches[name]), read, ENERGY_S)
        if joules:  # else the counter stands still
            yield EnergyUse(name, joules, steps, samples, source, time.time())
