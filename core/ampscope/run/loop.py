"""The probe loop: one mixed-precision training step at a time, watched by the instruments.

    for each batch:
        shadow   an fp32 copy runs the same step first, at sampled steps    (capture.shadow)
        forward  under autocast; hooks count every module's output          (capture.histograms)
        backward of scale * loss; tensor hooks count every gradient         (capture.histograms)
                 ── gradients complete, still scaled: count them            (capture.weights)
        unscale_ divides by the scale; the gradient norm is read            (capture.gradient_norm)
                 ── about to step: remember the weights
        step     left out by GradScaler when a gradient is not finite
        update   the scale halves after a skip, doubles after growth_interval good steps
                 ── compare the weights, write the step's records

The loss is bit-identical with the instruments on or off: they read, and never write. The shadow
runs the loss function once more, so with it this holds for state inside the module and for the
global random generators alone: a loss that counts its calls, or draws from a generator of its own,
sees one call more at each sampled step and at each skip.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.records import Cadence, StepRecord
from ampscope.run.device import peak_bytes
from ampscope.run.instruments import Instruments
from ampscope.run.training import Training, training_step
from ampscope.store.writer import RunWriter
from ampscope.workloads.protocol import Batch


class ProbeLoop:
    """Runs steps and writes what the instruments saw; without a writer it only trains."""

    def __init__(
        self,
        training: Training,
        cadence: Cadence,
        writer: RunWriter | None,
        arithmetic: TorchDispatchMode | None = None,
    ) -> None:
        self.training = training
        self.losses: list[float] = []
        self._writer = writer
        self._arithmetic = arithmetic
        self._instruments: Instruments | None = None
        if writer is not None:
            self._instruments = Instruments(training, cadence, writer, arithmetic)
        self._flush_s = 0.0

    @property
    def note(self) -> str:
        """One sentence on what could not be recorded, or nothing."""
        return self._instruments.note if self._instruments else ""

    def observing(self) -> AbstractContextManager[None]:
        """Attach the instruments; detach all on exit."""
        return self._instruments.attached() if self._instruments else contextlib.nullcontext()

    def step(self, number: int, batch: Batch) -> None:
        """One training step and its records; ``batch`` as the workload gave it."""
        if self._instruments is None or self._writer is None:
            with self._arithmetic or contextlib.nullcontext():
                self._train(batch)
            return
        started = time.perf_counter()
        scaler, instruments = self.training.scaler, self._instruments
        scale = float(scaler.get_scale())
        instruments.start(number, batch, scale)
        with instruments.recording():
            self._train(batch)
        # With a fused optimizer torch leaves the skip to its kernel: then the scale's fall tells.
        fell = float(scaler.get_scale()) < scale
        skipped = scaler.is_enabled() and (instruments.was_skipped or fell)
        instruments.finish(skipped=skipped)
        overhead_s = instruments.take_elapsed_s()
        step_time_s = max(time.perf_counter() - started - overhead_s, 0.0)
        # The last flush belongs to the instruments, and came after its own step's record.
        overhead_s += self._flush_s
        record = self._record(number, scale, skipped, step_time_s, overhead_s)
        self._writer.add_step(record)
        self._flush()

    def _train(self, batch: Batch) -> None:
        loss = training_step(self.training, self.training.real_batch(batch))
        if self.training.device.type == "cuda":
            torch.cuda.synchronize(self.training.device)
        self.losses.append(float(loss.detach()))

    def _record(
        self, number: int, scale: float, skipped: bool, step_time_s: float, overhead_s: float
    ) -> StepRecord:
        scaler, instruments = self.training.scaler, self._instruments
        assert instruments is not None
        enabled = scaler.is_enabled()
        return StepRecord(
            step=number,
            loss=self.losses[-1],
            scale=scale if enabled else None,
            growth_counter=scaler.state_dict()["_growth_tracker"] if enabled else None,
            skipped=skipped,
            grad_norm=instruments.grad_norm,
            lr=float(self.training.optimizer.param_groups[0]["lr"]),
            step_time_s=step_time_s,
            overhead_s=overhead_s,
            peak_bytes=peak_bytes(self.training.device),
            moved_share=instruments.moved_share,
            op_set=instruments.op_set,
            ended_at=time.time(),
            unclipped_norm=instruments.unclipped_norm,
        )

    def _flush(self) -> None:
        assert self._writer is not None
        started = time.perf_counter()
        self._writer.flush_if_due()
        self._flush_s = time.perf_counter() - started
