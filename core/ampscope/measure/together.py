"""Trainings of one seed in several precisions, turn and turn about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch

from ampscope.errors import Cancelled
from ampscope.measure.phases import StepSeconds, timed_step
from ampscope.measure.rebatch import resized
from ampscope.records import RunSpec
from ampscope.run.probe import prepare
from ampscope.run.training import Training
from ampscope.workloads.protocol import Batch, iterate

Trainings = dict[str, Training]


def prepared(spec: RunSpec, device: torch.device) -> Trainings:
    """One training a precision, each from the weights and batches of the spec's seed."""
    return {n: prepare(dataclasses.replace(spec, precision=n), device) for n in spec.precisions}


class Together:
    """The trainings of one seed."""

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


def batches_of(training: Training, spec: RunSpec, samples: int = 0) -> Iterator[Batch]:
    """Without end; ``samples`` each, else what the spec asks for, else as they come."""
    source = iterate(training.workload)
    wanted = samples or spec.batch
    return resized(source, wanted, spec.workload) if wanted else source


def batch_of(training: Training, spec: RunSpec, samples: int = 0) -> Batch:
    """One of these, as the model is fed it."""
    return training.real_batch(next(batches_of(training, spec, samples)))
