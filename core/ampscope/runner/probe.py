"""The probe loop: one mixed-precision training step at a time, watched by the instruments.

    for each batch:
        shadow   an fp32 copy runs the same step first, at sampled steps    (capture.shadow)
        forward  under autocast; hooks count every module's output          (capture.histograms)
        backward of scale * loss; tensor hooks count every gradient         (capture.histograms)
                 ── gradients complete, still scaled: count them            (capture.weights)
        unscale_ divides by the scale; the gradient norm is read            (capture.weights)
                 ── about to step: remember the weights
        step     left out by GradScaler when a gradient is not finite
        update   the scale halves after a skip, doubles after growth_interval good steps
                 ── compare the weights, write the step's records

The two marked moments are callbacks of the step (runner.training) to the instruments
(runner.instruments).

The loss is bit-identical with the instruments on or off: they read, and never write. The shadow
runs the loss function once more, so with it this holds for state inside the module and for the
global random generators alone: a loss that counts its calls, or draws from a generator of its own,
sees one call more at each sampled step and at each skip.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ampscope.capture.exponent_count import prepare as prepare_counter
from ampscope.capture.script.mode_sleep import ModeSleep
from ampscope.control import Control
from ampscope.errors import BadInput, Cancelled
from ampscope.numerics.formats import dtype_name
from ampscope.policy.autocast_lists import resolve
from ampscope.policy.device_profiles import SimulatedDevice
from ampscope.policy.precision import (
    convert_model,
    custom_lists,
    forward_autocast,
    step_arithmetic,
    torch_dtype,
)
from ampscope.policy.rehearsal import cuda_autocast_lists
from ampscope.policy.tensor_core import TensorCoreMode
from ampscope.records import Cadence, RunSpec, StepRecord
from ampscope.runner.device import peak_bytes
from ampscope.runner.instruments import Instruments
from ampscope.runner.training import ObservedScaler, ProbeTraining, training_step
from ampscope.store.writer import RunWriter
from ampscope.workloads.load import load
from ampscope.workloads.protocol import Batch, Workload, iterate, move

# Run one probe from its spec: build the workload, choose device and precision, drive the loop.


def prepare(spec: RunSpec, device: torch.device) -> ProbeTraining:
    """Workload, model, optimizer and scaler of ``spec`` on ``device``.

    Raises BadInput for anything about the workload or the precision that cannot be done.
    """
    precision = resolve(spec.precision, device.type)
    torch.manual_seed(spec.seed)
    workload = load(spec.workload, size=spec.size, seed=spec.seed, loss_factor=spec.loss_factor)
    model = workload.model.to(device=device)
    convert_model(model, precision)
    model_dtype = torch_dtype(precision.model_dtype) if precision.model_dtype else None
    scaler = ObservedScaler(
        device.type,
        enabled=precision.scaler,
        init_scale=spec.scaler.init_scale,
        growth_factor=spec.scaler.growth_factor,
        backoff_factor=spec.scaler.backoff_factor,
        growth_interval=spec.scaler.growth_interval,
    )
    return ProbeTraining(
        workload=workload,
        model=model,
        optimizer=_optimizer(workload),
        scaler=scaler,
        autocast=partial(forward_autocast, precision, device.type),
        arithmetic=partial(step_arithmetic, precision, device.type),
        device=device,
        compute_format=dtype_name(precision.autocast_dtype or precision.model_dtype or "float32"),
        real_batch=lambda batch: move(batch, device, model_dtype),
        shadow_batch=lambda batch: move(batch, device, torch.float32),
    )


def preload(device: torch.device) -> None:
    """Load what the first step would load: 1.1 s of torch._dynamo, which every optimizer imports,
    and 0.4 s of the compiled counter of a CPU. A GPU may still be another run's."""
    import torch._dynamo  # noqa: F401  # loads it

    if device.type == "cpu":
        prepare_counter(device)


@contextlib.contextmanager
def arithmetic(policy: str, device: SimulatedDevice | None = None) -> Iterator[None]:
    """Under the policy ``rehearsal`` a CPU follows CUDA's autocast lists and computes half
    matmuls as Tensor Cores do; under any other the device's own rules apply. ``device`` tells when
    half precision takes part: before, ops run at their own speed. Half that begins within a
    backward pass is computed as on a CPU until that has ended."""
    if policy != "rehearsal":
        yield
        return
    with cuda_autocast_lists(), TensorCoreMode() as cores:
        if device is None:
            yield
            return
        sleep = ModeSleep(cores)
        sleep.leave()

        def wake() -> bool:
            sleep.wake()
            return not sleep.is_asleep

        device.on_half = wake
        try:
            yield
        finally:
            device.on_half = None
            sleep.close()


def drive(
    spec: RunSpec,
    training: ProbeTraining,
    policy: str,
    writer: RunWriter | None,
    is_cancelled: Callable[[], bool] = bool,
) -> ProbeLoop:
    """Run the spec's steps. Raises Cancelled when ``is_cancelled()`` turns true between steps."""
    # Ops are sent to the arithmetic step by step, so that the op trace can run them through it.
    rehearses = policy == "rehearsal"
    loop = ProbeLoop(training, spec.cadence, writer, TensorCoreMode() if rehearses else None)
    lists = cuda_autocast_lists() if rehearses else contextlib.nullcontext()
    batches = iterate(training.workload)
    torch.manual_seed(spec.seed)  # the loop starts from the same state however the build went
    changed = custom_lists(Control(spec.control).list_changes, training.device.type)
    with lists, changed, loop.observing():
        for number in range(spec.steps):
            if is_cancelled():
                raise Cancelled(f"Cancelled after {number} steps.")
            loop.step(number, next(batches))
    return loop


def _optimizer(workload: Workload) -> torch.optim.Optimizer:
    try:
        optimizer = workload.optimizer(workload.model.parameters())
    except Exception as error:
        raise BadInput(f"`optimizer` raised {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"`optimizer` returned {type(optimizer).__name__}, not an optimizer.")
    return optimizer


class ProbeLoop:
    """Runs steps and writes what the instruments saw; without a writer it only trains."""

    def __init__(
        self,
        training: ProbeTraining,
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
        # With a fused optimizer torch leaves the skip to its kernel; the scale's fall shows it.
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
