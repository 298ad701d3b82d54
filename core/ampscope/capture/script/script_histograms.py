"""Exponent histograms and ops of an untouched script, one frame an attempted optimizer step.

Activations and output gradients are counted by the hooks that a probe uses. The optimizer's own
parameters, their gradients and their updates are counted when the script calls ``unscale_`` or the
step, so gradients are seen as backward left them, still scaled.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._mode_utils import no_dispatch

from ampscope.capture import gradient_rows
from ampscope.capture.accumulator import Accumulator
from ampscope.capture.failures import Failures
from ampscope.capture.histograms import HistogramHooks
from ampscope.capture.op_trace import OpTrace
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.optimizer_facts import parameters_of
from ampscope.capture.script.script_models import ScriptModels
from ampscope.capture.tensors import opened
from ampscope.records import Cadence, Frame, ModuleRecord, NonFiniteRecord, OpRecord, Role


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured at attempts that are over; ``op_sets`` maps an attempt to its ops' id."""

    modules: list[ModuleRecord]
    frames: list[Frame]
    nonfinite: list[NonFiniteRecord]
    ops: list[tuple[int, list[OpRecord]]]
    op_sets: dict[int, int]


class ScriptHistograms:
    """Counts while entered; :meth:`take` gives what came since the last call."""

    def __init__(self, paths: ModulePaths, cadence: Cadence) -> None:
        self.models = ScriptModels(paths)
        self.failures = Failures()
        self.trace = OpTrace(self.models, failures=self.failures)
        self._cadence = cadence
        self._counts = Accumulator(self.failures)
        self._hooks = HistogramHooks(self.models, self._counts, self.failures)
        self._attempt = 0
        self._elapsed_s = 0.0
        self._counted: set[int] = set()  # ids of optimizers whose gradients were counted
        self._before: dict[int, list[Tensor | None]] = {}  # None: cannot be read
        self._frames: list[Frame] = []
        self._nonfinite: list[NonFiniteRecord] = []
        self._op_sets: dict[int, int] = {}
        self._ops: list[tuple[int, list[OpRecord]]] = []

    def __enter__(self) -> ScriptHistograms:
        self._hooks.__enter__()
        self.trace.place.__enter__()
        self._begin(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._end()
        self.trace.place.__exit__(kind, error, where)
        self._hooks.__exit__(kind, error, where)
        self.models.close()

    @property
    def traces(self) -> bool:
        """Whether the ops of this attempt are wanted."""
        return _is_due(self._attempt, self._cadence.trace)

    @property
    def elapsed_s(self) -> float:
        """Time spent here so far, which is none of the script's."""
        return self._elapsed_s + self._hooks.elapsed_s + self.trace.elapsed_s

    def switch_off(self) -> None:
        """Count nothing more: this is a fork of the script's process."""
        self._cadence = Cadence(0, 0, 0)
        self._hooks.active = False

    def record_op(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """The script has run one op."""
        if self.traces:
            started = time.perf_counter()
            self.trace.record(func, args, kwargs, out)
            self._elapsed_s += time.perf_counter() - started

    def gradients_complete(self, optimizer: Optimizer) -> None:
        """The script is about to unscale, step or skip; the first of these calls counts."""
        self.trace.place.outside = "step"
        if id(optimizer) in self._counted or not _is_due(self._attempt, self._cadence.histogram):
            return
        self._counted.add(id(optimizer))
        with self._timed():
            self._count_parameters(optimizer)

    def _count_parameters(self, optimizer: Optimizer) -> None:
        for parameter in parameters_of(optimizer):
            position = self.models.position(parameter)
            if position is not None and parameter.is_floating_point():
                owner = self.models.owner_at(position)
                self._counts.add(Role.WEIGHT, owner, parameter, stable=True)
                if parameter.grad is not None:
                    self._counts.add(Role.WEIGHT_GRAD, position, parameter.grad, stable=True)
        self._counts.flush()

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer's own step is about to run."""
        if _is_due(self._attempt, self._cadence.histogram):
            with self._timed(), torch.no_grad(), no_dispatch():
                held = [opened(parameter) for parameter in parameters_of(optimizer)]
                self._before[id(optimizer)] = [None if v is None else v.clone() for v in held]

    def after_step(self, optimizer: Optimizer) -> None:
        """It has run."""
        before = self._before.pop(id(optimizer), [])
        with self._timed(), torch.no_grad(), no_dispatch():
            for parameter, old in zip(parameters_of(optimizer), before, strict=False):
                owner = self.models.owner(parameter)
                now = opened(parameter)
                if owner is None or now is None or old is None or now.shape != old.shape:
                    continue
                if now.is_floating_point() and now.itemsize > 1:  # of 8 bits torch subtracts none
                    self._counts.add(Role.UPDATE, owner, now - old, stable=True)
            self._counts.flush()

    def attempt_ended(self, count: int, scale: float) -> None:
        """An attempt is over, ``count`` in all; its gradients carried ``scale``."""
        with self._timed():
            self._end(scale)
        self._begin(count)

    def take(self) -> Measured:
        """What came since the last call."""
        measured = Measured(
            self.models.take_records(), self._frames, self._nonfinite, self._ops, self._op_sets
        )
        self._frames, self._nonfinite, self._ops, self._op_sets = [], [], [], {}
        return measured

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self.trace.place.outside = "forward"
        due = _is_due(attempt, self._cadence.histogram)
        self._hooks.start_step(attempt, active=due)

    def _end(self, scale: float = 1.0) -> None:
        self._hooks.end_step()
        self._counted.clear()
        self._before.clear()
        frames = self._counts.take(self._attempt, scale)
        reached = self.models.take_arrivals()
        if (gradients := frames.pop(Role.WEIGHT_GRAD, None)) is not None:
            # A parameter that was frozen when its model first ran has no place in backward's order.
            order = dict.fromkeys((*reached, *gradients.modules))
            models = self.models
            self._nonfinite += gradient_rows.nonfinite(gradients, order, models.name_at)
            frames[Role.WEIGHT_GRAD] = gradient_rows.by_module(gradients, models.owner_at)
        self._frames += frames.values()
        if self.traces:
            number, ops = self.trace.take()
            self.trace.forget()
            self._op_sets[self._attempt] = number
            if ops:
                self._ops.append((number, ops))

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with self.failures.contained("the histograms of a step"):
                yield
        finally:
            self._elapsed_s += time.perf_counter() - started


def _is_due(attempt: int, every: int) -> bool:
    return every > 0 and attempt % every == 0
