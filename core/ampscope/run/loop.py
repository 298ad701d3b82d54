"""The probe loop: one mixed-precision training step at a time, watched by the instruments.

    for each batch:
        shadow   an fp32 copy runs the same step first, at sampled steps        (capture.shadow)
        forward  under autocast; hooks count every module's output              (capture.histograms)
        backward of scale * loss; tensor hooks count every gradient             (capture.histograms)
                 ── gradients complete, still scaled: count them                (capture.weights)
        unscale_ divides by the scale; the gradient norm is read
                 ── about to step: remember the weights
        step     left out by GradScaler when a gradient is not finite
        update   the scale halves after a skip, doubles after growth_interval good steps
                 ── compare the weights, write the step's records

The loss is bit-identical with the instruments on or off: they read, and never write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampscope.capture.histograms import HistogramHooks
from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from ampscope.capture.shadow import Shadow
from ampscope.capture.weights import WeightObserver
from ampscope.errors import BadInput
from ampscope.records import Cadence, StepRecord
from ampscope.run.device import peak_bytes
from ampscope.run.scaler import ObservedScaler
from ampscope.store.writer import RunWriter
from ampscope.workloads.protocol import Batch, Workload


@dataclass(slots=True)
class Training:
    """Everything a step needs, on its device and in its precision."""

    workload: Workload
    model: nn.Module
    optimizer: Optimizer
    scaler: ObservedScaler
    autocast: Callable[[], AbstractContextManager[object]]
    device: torch.device
    compute_format: str  # "fp16", "bf16" or "fp32": what the precision mode computes in
    twin_batch: Callable[[Batch], Batch]  # a batch for the fp32 shadow


def default_step(training: Training, batch: Batch) -> Tensor:
    """The usual four calls; returns the unscaled loss."""
    optimizer, scaler = training.optimizer, training.scaler
    optimizer.zero_grad(set_to_none=True)
    with training.autocast():
        loss = checked_loss(training.workload.loss(training.model, batch))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return loss


def checked_loss(loss: object) -> Tensor:
    """The loss if it can be trained on. Raises BadInput otherwise."""
    if not isinstance(loss, Tensor):
        raise BadInput(
            f"`loss` returned {type(loss).__name__}, not a tensor. Return a scalar tensor."
        )
    if loss.numel() != 1:
        raise BadInput(
            f"`loss` returned a tensor of shape {tuple(loss.shape)}. Reduce it to one number, "
            "for example with .mean()."
        )
    if not loss.requires_grad:
        raise BadInput(
            "The loss does not depend on any trainable parameter. Check requires_grad and detach()."
        )
    return loss


class ProbeLoop:
    """Runs steps and writes what the instruments saw."""

    def __init__(self, training: Training, cadence: Cadence, writer: RunWriter | None) -> None:
        self.training = training
        self.cadence = cadence
        self.writer = writer  # None: train only, for comparisons with and without instruments
        self.names = ModelMap(training.model)
        self.hooks = HistogramHooks(self.names)
        self.weights = WeightObserver(self.names)
        self.trace = OpTrace(self.names)
        self.losses: list[float] = []
        self._op_sets: set[int] = set()
        self._step = 0
        self._scale = 1.0
        self._grad_norm: float | None = None
        self._shadow: Shadow | None = None
        self._stepped = False
        self._flush_s = 0.0

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Attach the instruments that the cadence asks for; detach all on exit."""
        scaler = self.training.scaler
        if self.writer is None:
            yield
            return
        scaler.on_gradients, scaler.on_step = self._on_gradients, self._on_step
        self.writer.add_modules(self.names.records())
        try:
            with self.hooks, self.weights:
                yield
        finally:
            scaler.on_gradients, scaler.on_step = lambda: None, lambda optimizer, unscaled: None

    def step(self, number: int, batch: Batch) -> None:
        """One training step and its records."""
        started = time.perf_counter()
        self._step, self._grad_norm, self._stepped = number, None, False
        scaler = self.training.scaler
        before = self._scale = float(scaler.get_scale())
        overhead = self._start_instruments(number, batch)
        with contextlib.ExitStack() as stack:
            if self._shadow is not None:
                stack.enter_context(self._shadow)
            if self.writer is not None and _due(self.cadence.trace, number):
                stack.enter_context(self.trace)
            custom = self.training.workload.step
            if custom is None:
                loss = default_step(self.training, batch)
            else:
                t = self.training
                loss = checked_loss(custom(t.model, batch, t.optimizer, t.scaler, t.autocast))
        if self.training.device.type == "cuda":
            torch.cuda.synchronize(self.training.device)
        value = float(loss.detach())
        self.losses.append(value)
        if self.writer is None:
            return
        after = float(scaler.get_scale())
        # GradScaler has no public flag for a skip; the scale falls exactly when it skipped.
        record = self._finish_instruments(number, value, skipped=after < before)
        overhead += self.hooks.elapsed_s + self.weights.elapsed_s + self.trace.elapsed_s
        self.hooks.elapsed_s = self.weights.elapsed_s = self.trace.elapsed_s = 0.0
        overhead += self._flush_s
        step_time_s = time.perf_counter() - started - overhead + self._flush_s
        self.writer.add_step(_timed(record, step_time_s, overhead))
        now = time.perf_counter()
        self.writer.flush_if_due()
        self._flush_s = time.perf_counter() - now  # charged to the next step

    def _start_instruments(self, number: int, batch: Batch) -> float:
        """Prepare this step's instruments; returns the seconds that took."""
        if self.writer is None:
            return 0.0
        started = time.perf_counter()
        self.weights.start_step()
        self.hooks.step, self.hooks.active = number, _due(self.cadence.histogram, number)
        if _due(self.cadence.histogram, number):
            frame = self.weights.weights(number)
            if frame is not None:
                self.writer.add_frame(frame)
        self._shadow = None
        if _due(self.cadence.shadow, number) and self.training.compute_format != "fp32":
            shadow = Shadow(self.names, number, self.training.compute_format)
            shadow.scale = self._scale
            twin_batch = self.training.twin_batch(batch)
            shadow.run_twin(lambda model: checked_loss(self.training.workload.loss(model, twin_batch)))
            self._shadow = shadow
        return time.perf_counter() - started

    def _on_gradients(self) -> None:
        """Gradients are complete and still scaled."""
        self.hooks.active = False
        due = _due(self.cadence.histogram, self._step)
        if self._shadow is not None:
            self._shadow.compare_weights()
        if due and self.writer is not None:
            frame, bad = self.weights.gradients(self._step, self._scale)
            if frame is not None:
                self.writer.add_frame(frame)
            self.writer.add_nonfinite(bad)

    def _on_step(self, optimizer: Optimizer, unscaled: bool) -> None:
        """The optimizer is about to step, or to be skipped."""
        self.trace.phase = "step"
        grads = [p.grad for _, _, p in self.names.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        self._grad_norm = norm if unscaled else norm / self._scale
        if _due(self.cadence.histogram, self._step):
            self.weights.remember()
            self._stepped = True
        elif not math.isfinite(norm) and self.writer is not None:
            # Whatever the cadence: a skip always says which gradients were not finite.
            self.writer.add_nonfinite(self.weights.gradients(self._step, self._scale)[1])

    def _finish_instruments(self, number: int, loss: float, *, skipped: bool) -> StepRecord:
        assert self.writer is not None
        self.hooks.active, self.trace.phase = False, "forward"
        for accumulator in (self.hooks.activations, self.hooks.grad_outputs):
            frame = accumulator.take(number, self._scale)
            if frame is not None:
                self.writer.add_frame(frame)
        moved: float | None = None
        if self._stepped:
            frame, moved = self.weights.updates(number)
            if frame is not None:
                self.writer.add_frame(frame)
        if self._shadow is not None:
            self.writer.add_shadow(self._shadow.merged())
        op_set: int | None = None
        if _due(self.cadence.trace, number):
            op_set, ops = self.trace.take()
            if op_set not in self._op_sets:
                self._op_sets.add(op_set)
                self.writer.add_ops(op_set, ops)
        enabled = self.training.scaler.is_enabled()
        return StepRecord(
            step=number,
            loss=loss,
            scale=self._scale if enabled else None,
            growth_counter=self.training.scaler.state_dict()["_growth_tracker"] if enabled else None,
            skipped=skipped,
            grad_norm=self._grad_norm,
            lr=float(self.training.optimizer.param_groups[0]["lr"]),
            peak_bytes=peak_bytes(self.training.device),
            moved_share=moved,
            op_set=op_set,
        )


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _timed(record: StepRecord, step_time_s: float, overhead_s: float) -> StepRecord:
    return dataclasses.replace(
        record, step_time_s=max(step_time_s, 0.0), overhead_s=overhead_s
    )


