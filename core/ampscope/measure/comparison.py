"""Precisions side by side: the same model, batches and random state in each, turn and turn about.

    for each seed:
        build one training a precision, from the same weights
        for each step:
            one step in every precision, on the same batch, the first one another every time
    then, of the last seed's trainings: the share of casts, what memory is for, time at other batch
    sizes, and energy where the device has a counter

Drift (a processor that gets warm, another program that starts) falls on all precisions alike.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import torch

from ampscope.errors import BadInput
from ampscope.measure.beside_steps import Limit, energy, memory, other_sizes, step_times
from ampscope.measure.cast_share import cast_share
from ampscope.measure.phases import StepSeconds
from ampscope.measure.rebatch import batch_size
from ampscope.measure.together import Together, Trainings, batch_of, prepared
from ampscope.records import LossCurve, RunSpec
from ampscope.run.training import Training
from ampscope.store.writer import RunWriter

WARM_UP = 2  # steps that are not timed: kernels are chosen, optimizers make their state
LEAST_STEPS = 6
STEPS_SHARE = 0.6  # of the time limit, for the steps of all seeds


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Compare ``spec.precisions``; one sentence on what could not be measured."""
    limit = Limit(spec.time_limit_s)
    trainings: Trainings = {}
    taken: dict[str, list[StepSeconds]] = {name: [] for name in spec.precisions}
    notes: list[str] = []
    steps = spec.steps
    for number in range(spec.seeds):
        trainings.clear()
        gc.collect()  # the last seed's models go before the next ones come
        seeded = dataclasses.replace(spec, seed=spec.seed + number)
        trainings.update(prepared(seeded, device))
        together = Together(trainings, seeded, is_cancelled)
        if number == 0:
            steps = _affordable(spec, together, limit, notes)
        for name, seen in together.train(steps).items():
            taken[name] += seen[WARM_UP:]
            losses = tuple(s.loss for s in seen)
            skipped = tuple(i for i, s in enumerate(seen) if s.skipped)
            writer.add_result(LossCurve(name, seeded.seed, losses, skipped))
        writer.flush()
    samples = _samples(spec, next(iter(trainings.values())), notes)
    for name, seen in taken.items():
        share = cast_share(trainings[name], batch_of(trainings[name], spec))
        writer.add_result(step_times(name, samples, seen, share))
    writer.flush()
    memory(trainings, spec, samples, writer)
    other_sizes(trainings, spec, samples, writer, limit, is_cancelled)
    notes += energy(trainings, spec, samples, writer, limit)
    return " ".join(notes)


def _affordable(spec: RunSpec, together: Together, limit: Limit, notes: list[str]) -> int:
    """Steps a seed that fit into their share of the time limit, by what the first ones took."""
    together.train(min(WARM_UP, spec.steps))
    left_s = spec.time_limit_s * STEPS_SHARE - limit.gone_s()
    fits = int(left_s / max(together.seconds_a_round() * spec.seeds, 1e-9))
    steps = min(spec.steps, max(fits, LEAST_STEPS))
    if steps < spec.steps:
        notes.append(
            f"{steps} steps a seed instead of {spec.steps:,}, to stay within the time limit of "
            f"{spec.time_limit_s:g} s."
        )
    return steps


def _samples(spec: RunSpec, training: Training, notes: list[str]) -> int:
    """Samples a step; 0 where no batch dimension can be told."""
    try:
        return batch_size(batch_of(training, spec), spec.workload)
    except BadInput as error:
        notes.append(str(error))
        return 0
