"""Training steps of one model in one precision, timed and taken apart.

A step is timed with its phases (:func:`timed_step`), on the workload's own batches or on some of
another size (:func:`batches_of`). One more step each says how much of it casts take
(:func:`cast_share`), and what its memory is for (:func:`memory_split`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

from ampscope.errors import BadInput
from ampscope.measure.live_bytes import LiveBytes
from ampscope.measure.timing import mark, summary, synchronize
from ampscope.records import MemorySplit, RunSpec, StepTimes
from ampscope.runner.probe import prepare
from ampscope.runner.training import ProbeTraining, default_step, training_step
from ampscope.workloads.protocol import Batch, iterate

Trainings = dict[str, ProbeTraining]  # by precision
WARM_UP = 2  # steps that are not timed: kernels are chosen, optimizers make their state
DeviceType = torch._C._autograd.DeviceType
CAST = "aten::_to_copy"  # every .to(dtype), autocast's own included


def prepared(spec: RunSpec, device: torch.device) -> Trainings:
    """One training per precision, each from the weights and batches of the spec's seed."""
    return {n: prepare(dataclasses.replace(spec, precision=n), device) for n in spec.precisions}


def batches_of(training: ProbeTraining, spec: RunSpec, samples: int = 0) -> Iterator[Batch]:
    """Without end; ``samples`` each, else what the spec asks for, else as they come.

    Samples are repeated or cut off: time and memory depend on shapes, not on which samples come
    twice.
    """
    source = iterate(training.workload)
    wanted = samples or spec.batch
    return resized(source, wanted, spec.workload) if wanted else source


def batch_of(training: ProbeTraining, spec: RunSpec, samples: int = 0) -> Batch:
    """One of these, as the model is fed it."""
    return training.real_batch(next(batches_of(training, spec, samples)))


def batch_size(batch: Batch, name: str = "the workload") -> int:
    """Samples in a batch: the first dimension of every tensor in it. Raises BadInput where they
    differ, so that the batch dimension is unknown."""
    leaves = tree_leaves(batch, is_leaf=lambda part: isinstance(part, PackedSequence))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise BadInput(f"A batch of {name} is a PackedSequence, which has no batch dimension.")
    if not tensors:
        raise BadInput(f"A batch of {name} holds no tensor with a dimension, so none to enlarge.")
    found = sorted({tensor.shape[0] for tensor in tensors})
    if len(found) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
        raise BadInput(
            f"No batch dimension was found in {name}: the tensors of a batch begin with "
            f"different numbers ({shapes}). Give every tensor one row per sample."
        )
    if not found[0]:
        raise BadInput(f"A batch of {name} holds no sample.")
    return found[0]


def resized(batches: Iterator[Batch], samples: int, name: str = "the workload") -> Iterator[Batch]:
    """Each batch with so many samples: cut off, or repeated from the beginning."""
    for batch in batches:
        rows = torch.arange(samples) % batch_size(batch, name)

        def chosen(leaf: object, rows: Tensor = rows) -> object:
            is_split = isinstance(leaf, Tensor) and leaf.dim() > 0
            return leaf[rows.to(leaf.device)] if is_split else leaf  # type: ignore[index, attr-defined]  # a Tensor

        yield tree_map(chosen, batch)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """One step: the host's clock around all of it, and its phases (None for a custom step)."""

    step: float
    phases: tuple[float, float, float] | None  # forward, backward, optimizer
    loss: float
    skipped: bool


def timed_step(training: ProbeTraining, batch: Batch) -> StepSeconds:
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


class _Marks:
    """Moments of a step: the host's clock on a CPU, events of the device on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[object] = []

    def __call__(self) -> None:
        if self._is_cuda:
            event = mark()
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


def step_times(
    name: str, samples: int, seen: list[StepSeconds], share: float | None, *, is_base: bool = True
) -> StepTimes:
    """Medians and quartiles over steps."""
    phases = list(zip(*(s.phases for s in seen if s.phases is not None), strict=True))
    forward, backward, optimizer = map(summary, phases) if phases else (None, None, None)
    step = summary([s.step for s in seen])
    return StepTimes(name, samples, step, forward, backward, optimizer, share, time.time(), is_base)


def cast_share(training: ProbeTraining, batch: Batch) -> float | None:
    """Share of a step's op time in casts between floating-point formats, 0 … 1; None where the
    profiler saw no op. It slows small ops down most, so this step is not one of those timed."""
    is_cuda = training.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as seen:
        training_step(training, batch)
        synchronize(training.device)
    total = casts = 0.0
    for row in seen.key_averages():
        if row.device_type != DeviceType.CPU:
            continue  # a kernel's own row: the row of its op has that time as well
        own = row.self_device_time_total if is_cuda else row.self_cpu_time_total
        total += own
        if row.key == CAST:
            casts = row.device_time_total if is_cuda else row.cpu_time_total
    return min(casts / total, 1.0) if total else None


def memory_split(
    training: ProbeTraining, batch: Batch, name: str, samples: int, is_base: bool = True
) -> MemorySplit:
    """Of one step, whose gradients are made anew."""
    device, peak = training.device, None
    training.optimizer.zero_grad(set_to_none=True)
    with LiveBytes(training.model, training.optimizer, batch) as live:
        own, others = live.peak, 0
        if device.type == "cuda":  # the other precisions' models are on the device as well
            others = torch.cuda.memory_allocated(device) - own
            torch.cuda.reset_peak_memory_stats(device)
        training_step(training, batch)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - others
    return MemorySplit(
        name, samples, **live.at_peak, device_peak=peak, measured_at=time.time(), is_base=is_base
    )
