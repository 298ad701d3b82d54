"""The instruments of a probe, put together: what each of them does at which moment of a step.

One step, and who is called when (the loop's docstring has the training's side of it)::

    start       weights counted; the fp32 shadow runs its own step, at sampled steps
    recording   op trace and shadow comparison are attached to the real step
    gradients   complete, still scaled: counted, compared with the shadow's
    before      the optimizer's step: gradient norm; the weights are remembered
    finish      updates counted; everything goes to the writer
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.histograms import HistogramHooks
from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from ampscope.capture.shadow import Shadow
from ampscope.capture.weights import WeightObserver
from ampscope.records import Cadence, Role
from ampscope.run.training import Training, checked_loss
from ampscope.store.writer import RunWriter
from ampscope.workloads.protocol import Batch


class Instruments:
    """Everything that watches one training; what it saw goes to ``writer``."""

    def __init__(
        self,
        training: Training,
        cadence: Cadence,
        writer: RunWriter,
        arithmetic: TorchDispatchMode | None = None,
    ) -> None:
        self.training = training
        self.cadence = cadence
        self.writer = writer
        self.grad_norm: float | None = None  # of this step, unscaled
        self.moved_share: float | None = None
        self.op_set: int | None = None
        self._names = ModelMap(training.model)
        self._counts = Accumulator()
        self._hooks = HistogramHooks(self._names, self._counts)
        self._weights = WeightObserver(self._names, self._counts)
        self._trace = OpTrace(self._names, executes=arithmetic)
        self._arithmetic = arithmetic
        self._shadow: Shadow | None = None
        self._has_stepped = False
        self._step, self._scale = -1, 1.0
        self._elapsed_s = 0.0

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on; all off on exit."""
        scaler = self.training.scaler
        scaler.on_gradients, scaler.on_step = self._on_gradients, self._on_step
        self.writer.add_modules(self._names.records())
        try:
            with self._hooks, self._weights:
                yield
        finally:
            scaler.unobserved()

    def start(self, step: int, batch: Batch, scale: float) -> None:
        """Before the step."""
        with self._timed():
            self._step, self._scale, self._has_stepped = step, scale, False
            self.grad_norm = self.moved_share = self.op_set = None
            self._weights.start_step()
            if due(self.cadence.histogram, step):
                self._weights.count_weights()
            self._shadow = self._new_shadow(batch) if due(self.cadence.shadow, step) else None
            self._hooks.start_step(step, active=due(self.cadence.histogram, step))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around the step itself."""
        with contextlib.ExitStack() as stack:
            if self._shadow is not None:
                stack.enter_context(self._shadow)
            if due(self.cadence.trace, self._step):
                stack.enter_context(self._trace)
            elif self._arithmetic is not None:
                stack.enter_context(self._arithmetic)  # type: ignore[arg-type]  # its __enter__ is untyped
            yield

    def finish(self, *, skipped: bool) -> None:
        """After the step; what was seen goes to the writer."""
        with self._timed():
            self._hooks.end_step()
            if skipped:
                self.moved_share = 0.0
            elif self._has_stepped:
                self._weights.count_updates()
            self._write_frames()
            if self._shadow is not None:
                self.writer.add_shadow(self._shadow.take())
                self._shadow = None
            if due(self.cadence.trace, self._step):
                self.op_set, ops = self._trace.take()
                self.writer.add_ops(self.op_set, ops)

    def elapsed_s(self) -> float:
        """Wall time of the instruments since the last call."""
        parts = (self._hooks, self._trace) if self._shadow is None else (self._hooks, self._trace, self._shadow)
        total = self._elapsed_s + sum(part.elapsed_s for part in parts)
        for part in parts:
            part.elapsed_s = 0.0
        self._elapsed_s = 0.0
        return total
