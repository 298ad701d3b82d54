"""Lesson 3: one backward pass in fp16 at many loss scales, each element compared with fp32.

    five fp32 steps, so that the gradients are those of a model that learns
    fp32 pass       -> the exponent histogram that the page's slider moves
    fp16 passes     -> at 1, 4, 16, … 2^40: lost, subnormal, zero in both, not finite

The same weights and batch throughout; nothing is stepped between the passes. Counted are the
gradients of module outputs that flow in fp16: what autocast leaves in fp32 cannot underflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.ext.lessons.gradients import Gradients, exponents_of, output_gradients
from ampscope.numerics.formats import FP16
from ampscope.records import Histogram, Reading, Result, UnderflowCounts
from ampscope.workloads.load import load
from ampscope.workloads.protocol import Batch, Workload, iterate, move

INFO = LessonInfo(
    id="underflow",
    number=3,
    title="Underflow and loss scaling",
    icon="vertical_align_bottom",
    sentence="In fp16 small gradients become zero; multiplying the loss moves all of them up at "
    "once.",
    settings={"model": ("gpt", "lenet"), "loss": ("small", "usual")},
)
WARM_UP = 5
EXPONENTS = tuple(range(0, 41, 2))  # of the loss scales that are run
SMALL_LOSS = 2.0**-11  # what a mean over many, or a small weight, does to a loss


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """The fp32 histogram, then one :class:`UnderflowCounts` per scale."""
    factor = SMALL_LOSS if asked["loss"] == "small" else 1.0
    workload = load(asked["model"], loss_factor=factor)
    model, batches = workload.model.to(device), iterate(workload)
    optimizer = workload.optimizer(model.parameters())
    for _ in range(WARM_UP):
        optimizer.zero_grad()
        workload.loss(model, move(next(batches), device)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    batch = move(next(batches), device)
    reference = _pass(workload, batch, None, 1.0)
    half = {e: _pass(workload, batch, torch.float16, 2.0**e) for e in EXPONENTS}
    narrow = [key for key, value in half[0].items() if value.dtype is torch.float16]
    row = exponents_of([reference[key] for key in narrow])
    yield Histogram("output gradients", "fp32", "fp32", tuple(row.tolist()))
    yield Reading("largest", "fp32", max(float(reference[k].abs().max()) for k in narrow))
    was_zero = torch.cat([reference[key].flatten() for key in narrow]) == 0
    for exponent, found in half.items():
        yield _underflow_counts(
            2.0**exponent, torch.cat([found[key].flatten() for key in narrow]), was_zero
        )


def _pass(workload: Workload, batch: Batch, dtype: torch.dtype | None, scale: float) -> Gradients:
    """One forward and backward; under autocast where ``dtype`` is given."""
    model = workload.model
    model.zero_grad()
    device = next(model.parameters()).device.type
    with output_gradients(model) as found:
        with torch.autocast(device, dtype=dtype or torch.float16, enabled=dtype is not None):
            loss = workload.loss(model, batch)
        (loss * scale).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return found


def _underflow_counts(scale: float, half: Tensor, was_zero: Tensor) -> UnderflowCounts:
    """All elements in one row each: a count an op, however many modules there are."""
    size = half.abs()
    zero = size == 0
    lost, small, before, nonfinite = (
        int(part.sum())
        for part in (
            zero & ~was_zero,
            (size > 0) & (size < FP16.min_normal),
            zero & was_zero,
            ~torch.isfinite(half),
        )
    )
    return UnderflowCounts("fp16", scale, half.numel(), lost, small, before, nonfinite)
