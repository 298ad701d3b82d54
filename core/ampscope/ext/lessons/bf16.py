"""Lesson 8: one model in fp32, bf16, fp16 and fp16 with a scaler: the gradients' errors, the loss.

range        of the gradients of one pass: how many are lost, how many are not finite
precision    how far the others are from fp32's, as a part of them
training     the loss of each way over the same batches; its end, for several seeds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.ext.lessons.gradients import Gradients, output_gradients
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.policy.precision import forward_autocast, step_arithmetic
from ampscope.records import Curve, Reading, Result
from ampscope.workloads.load import load
from ampscope.workloads.protocol import Workload, iterate, move

INFO = LessonInfo(
    id="bf16",
    number=8,
    title="bf16 or fp16",
    icon="balance",
    sentence="Sixteen bits buy range or precision: the same model in both, with and without a "
    "scaler.",
    settings={"loss": ("usual", "small")},
    revision=2,
)
STEPS, TAIL = 100, 20  # the end of a training is the mean loss of its last steps
SEEDS = 4  # one training's end can differ by a third for reasons that are not its precision
WAYS = ("fp32", "bf16", "fp16-noscaler", "fp16")
SMALL_LOSS = 2.0**-18


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """Errors of the first pass, a loss curve, and the ends of several trainings, way by way."""
    factor = SMALL_LOSS if asked["loss"] == "small" else 1.0
    reference: Gradients = {}
    for name in WAYS:
        ends = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            workload = load("mlp", seed=seed, loss_factor=factor)
            found, curve = _trained(workload, name, factor, device)
            ends.append(sum(curve.y[-TAIL:]) / TAIL)
            if seed == 0:
                if name == "fp32":
                    reference = found
                else:
                    yield from _errors(name, found, reference)
                yield curve
        yield Curve("end", name, tuple(map(float, range(SEEDS))), tuple(ends))


def _trained(
    workload: Workload, name: str, factor: float, device: torch.device
) -> tuple[Gradients, Curve]:
    """Gradients of the first pass, unscaled; losses without the factor."""
    precision = PRECISIONS[name]
    model, batches = workload.model.to(device), iterate(workload)
    optimizer = workload.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device.type, enabled=precision.scaler)
    losses: list[float] = []
    first: Gradients = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        with output_gradients(model) as found, step_arithmetic(precision, device.type):
            with forward_autocast(precision, device.type):
                loss = workload.loss(model, move(next(batches), device))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's is untyped
        if step == 0:
            scale = scaler.get_scale()
            first = {key: gradient.double() / scale for key, gradient in found.items()}
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()) / factor)
    return first, Curve("loss", name, tuple(map(float, range(STEPS))), tuple(losses))


def _errors(name: str, found: Gradients, reference: Gradients) -> Iterator[Reading]:
    half = torch.cat([found[key].flatten() for key in reference])
    exact = torch.cat([reference[key].flatten() for key in reference])
    known = exact != 0
    kept = known & (half != 0) & torch.isfinite(half)
    error = ((half - exact).abs() / exact.abs())[kept]
    yield Reading("lost", name, _share(known & (half == 0), known))
    yield Reading("not finite", name, _share(known & ~torch.isfinite(half), known))
    yield Reading("median error", name, float(error.median()) if error.numel() else float("nan"))


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.sum() / whole.sum())
