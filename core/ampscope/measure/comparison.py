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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ampscope.errors import BadInput
from ampscope.measure.beside_steps import Limit, energy, memory, other_sizes, step_times
from ampscope.measure.cast_share import cast_share
from ampscope.measure.phases import StepSeconds
from ampscope.measure.rebatch import batch_size
from ampscope.measure.script_comparison import compare_script
from ampscope.measure.together import Together, Trainings, batch_of, prepared
from ampscope.records import AS_IS, LossCurve, RunSpec
from ampscope.run.training import Training
from ampscope.store.writer import RunWriter

WARM_UP = 2  # steps that are not timed: kernels are chosen, optimizers make their state
LEAST_TIMED = 2
SLOW = 5.0  # times the fastest: half products without an instruction for them
STEPS_SHARE = 0.6  # of the time limit, for the steps of all seeds


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Compare ``spec.precisions``; one sentence on what could not be measured."""
    if spec.control == AS_IS:
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
        together = Together(trainings, seeded, is_cancelled)
        if plan is None:
            together.train(dict.fromkeys(trainings, WARM_UP))
            plan = _planned(spec, together.last_s(), limit)
        for name, seen in together.train(plan.steps(number)).items():
            if seen:
                taken[name] += seen[WARM_UP:]
                writer.add_result(_curve(name, seeded.seed, seen))
        writer.flush()
    assert plan is not None
    notes = list(plan.notes)
    samples = _samples(spec, next(iter(trainings.values())), notes)
    for name, seen in taken.items():
        share = cast_share(trainings[name], batch_of(trainings[name], spec))
        writer.add_result(step_times(name, samples, seen, share))
        writer.flush()
    memory(trainings, spec, samples, writer, skipped=plan.slow)
    fast = {name: training for name, training in trainings.items() if name not in plan.slow}
    slowest = max(seen[-1].step for name, seen in taken.items() if name in fast)
    other_sizes(fast, spec, samples, writer, limit, is_cancelled, slowest)
    notes += energy(fast, spec, samples, writer, limit)
    return " ".join(notes)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Steps a seed in each precision; those that are far slower than the rest train once."""

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
                f"{slow[name]} steps of one seed, which tells its time and not its loss."
            )
            left_s -= slow[name] * step_s
    rest_s = sum(step_s for name, step_s in seconds.items() if name not in slow)
    fits = int(left_s / max(rest_s * spec.seeds, 1e-9))
    usual = min(spec.steps, max(fits, WARM_UP + LEAST_TIMED))
    if usual < spec.steps:
        notes.append(
            f"{usual} steps a seed instead of {spec.steps:,}, to stay within the time limit of "
            f"{spec.time_limit_s:g} s."
        )
    return _Plan(usual, slow, tuple(seconds), tuple(notes))


def _curve(name: str, seed: int, seen: list[StepSeconds]) -> LossCurve:
    skipped = tuple(number for number, step in enumerate(seen) if step.skipped)
    return LossCurve(name, seed, tuple(step.loss for step in seen), skipped)


def _samples(spec: RunSpec, training: Training, notes: list[str]) -> int:
    """Samples a step; 0 where no batch dimension can be told."""
    try:
        return batch_size(batch_of(training, spec), spec.workload)
    except BadInput as error:
        notes.append(str(error))
        return 0
