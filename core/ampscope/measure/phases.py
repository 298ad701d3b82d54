"""The usual training step with marks between its phases: forward, backward, optimizer."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ampscope.measure.timing import synchronize
from ampscope.run.training import Training, default_step, training_step
from ampscope.workloads.protocol import Batch


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """One step: the host's clock around all of it, and its phases (None for a custom step)."""

    step: float
    phases: tuple[float, float, float] | None  # forward, backward, optimizer
    loss: float
    skipped: bool


class _Marks:
    """Moments of a step: the host's clock on a CPU, events of the device on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[object] = []

    def __call__(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> tuple[float, float, float]:
        """Between the four marks; the device has been waited for."""
        spans = []
        for first, last in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(first, float) and isinstance(last, float):
                spans.append(last - first)
            else:
                spans.append(first.elapsed_time(last) / 1000)  # type: ignore[attr-defined]  # Event
        return spans[0], spans[1], spans[2]


def timed_step(training: Training, batch: Batch) -> StepSeconds:
    """One optimizer step on ``batch``, which is on the device already."""
    scaler, device = training.scaler, training.device
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    synchronize(device)
    marks = _Marks(device)
    started = time.perf_counter()
    if training.workload.step is not None:
        loss = training_step(training, batch)
    else:
        loss = default_step(training, batch, marks)
    synchronize(device)
    elapsed_s = time.perf_counter() - started
    phases = None if training.workload.step is not None else marks.seconds()
    skipped = scaler.is_enabled() and scaler.get_scale() < scale
    return StepSeconds(elapsed_s, phases, float(loss.detach()), skipped)
