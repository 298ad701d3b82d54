"""Lesson 4: a real GradScaler at work, and what is needed to replay other policies.

A small MLP learns digits in fp16 under torch's GradScaler, with a growth interval of 20 instead of
2,000 so that growth is seen too. Kept of each step: the scale, whether the step was skipped, and
the exponent of the largest gradient, from which follows at which scales it would have overflowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.ext.lessons.gradients import Gradients, output_gradients
from ampscope.records import Curve, Reading, Result
from ampscope.workloads.load import load
from ampscope.workloads.protocol import iterate, move

INFO = LessonInfo(
    id="scaler",
    number=4,
    title="The dynamic scaler",
    icon="trending_up",
    sentence="The scaler finds its scale by trying: the first skipped steps are how it searches.",
    settings={"loss": ("sum", "mean")},
)
STEPS, INTERVAL = 150, 20
FIRST_SCALE = 2.0**16  # torch's
LR = {"sum": 0.05 / 32, "mean": 0.05}  # a summed loss has gradients 32 times as large


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """Four curves over the steps."""
    workload = load("mlp")
    model, batches = workload.model.to(device), iterate(workload)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR[asked["loss"]], momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE, growth_interval=INTERVAL)
    losses, scales, skips, tops = [], [], [], []
    for _ in range(STEPS):
        images, labels = move(next(batches), device)
        optimizer.zero_grad()
        scale = scaler.get_scale()
        with output_gradients(model) as found:
            with torch.autocast(device.type, dtype=torch.float16):
                loss = F.cross_entropy(model(images), labels, reduction=asked["loss"])
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's is untyped
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        scales.append(scale)
        skips.append(float(scaler.get_scale() < scale))
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        tops.append(math.nan if skips[-1] else _top(found, grads, scale))
    steps = tuple(map(float, range(STEPS)))
    for name, values in (("loss", losses), ("scale", scales), ("skipped", skips), ("top", tops)):
        yield Curve(name, "torch", steps, tuple(values))
    yield Reading("growth interval", "torch", INTERVAL)


def _top(found: Gradients, weights: list[Tensor], scale: float) -> float:
    """Exponent of the largest scaled gradient that fp16 must hold: those of outputs in fp16, and
    those of weights, which autocast computes in fp16 (here they are unscaled again)."""
    outputs = [float(g.abs().max()) for g in found.values() if g.dtype is torch.float16]
    largest = max(*outputs, *(float(w.abs().max()) * scale for w in weights))
    return float(math.frexp(largest)[1] - 1) if largest else math.nan
