"""Lesson 9: one overflow followed through a step, into the weights and out of them.

    step 0    a healthy batch
    step 1    a batch in which four samples are 40,000 times too large (or every batch from here on)
    step 2, 3 healthy batches again: is the model still alive?

The model is small and each op is named: linear, relu, linear, softmax, loss; their gradients; the
weights after the step. fp16 autocast, with or without GradScaler; what each place holds is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.records import NonFiniteCounts, Reading, Result
from ampscope.workloads.training_data import read_digits

INFO = LessonInfo(
    id="inf_to_nan",
    number=9,
    title="How one Inf becomes NaN",
    icon="link",
    sentence="One overflow, followed op by op from the forward pass into the weights.",
    settings={"scaler": ("without", "with"), "batch": ("one", "every")},
)
STEPS, BATCH, WIDTH, SPOILT = 4, 32, 32, 4
FACTOR = 40_000.0  # fits into fp16, whose largest is 65,504; the sums of the first layer do not
GAIN = 4.0  # on the first layer's weights: its sums reach 3 for a healthy sample
LR = 0.1


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """One :class:`NonFiniteCounts` per place and step, the scale and the loss of each step."""
    images, labels = (part.to(device) for part in read_digits())
    first, second = nn.Linear(64, WIDTH).to(device), nn.Linear(WIDTH, 10).to(device)
    with torch.no_grad():
        first.weight *= GAIN
    weights = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(weights, lr=LR)
    scaler = torch.amp.GradScaler(
        device.type, init_scale=2.0**10, enabled=asked["scaler"] == "with"
    )
    for step in range(STEPS):
        batch = images[step * BATCH : (step + 1) * BATCH].flatten(1).clone()
        targets = labels[step * BATCH : (step + 1) * BATCH]
        if step == 1 or (step > 1 and asked["batch"] == "every"):
            batch[:SPOILT] *= FACTOR
        optimizer.zero_grad()
        seen: dict[str, Tensor] = {"input": batch}
        with torch.autocast(device.type, dtype=torch.float16):
            seen["linear 1"] = first(batch)
            seen["relu"] = torch.relu(seen["linear 1"])
            seen["linear 2"] = second(seen["relu"])
        # Written out in fp32, as autocast runs it: each op is one of the chain's links.
        logits = seen["linear 2"].float()
        seen["softmax"] = torch.softmax(logits, 1)
        picked = seen["softmax"][torch.arange(BATCH), targets]
        seen["loss"] = -picked.clamp_min(1e-30).log().mean()
        for place in ("linear 1", "linear 2"):
            seen[place].retain_grad()
        for place, tensor in seen.items():
            yield _nonfinite_counts(asked["scaler"], step, place, "forward", tensor)
        scale = scaler.get_scale() if scaler.is_enabled() else 1.0
        scaler.scale(seen["loss"]).backward()  # type: ignore[no-untyped-call]  # torch's is untyped
        for place in ("linear 2", "linear 1"):
            yield _nonfinite_counts(
                asked["scaler"], step, f"gradient of {place}", "backward", seen[place].grad
            )
        grads = torch.cat([w.grad.flatten() for w in weights if w.grad is not None])
        yield _nonfinite_counts(asked["scaler"], step, "weight gradients", "backward", grads)
        before = torch.cat([w.detach().flatten() for w in weights]).clone()
        scaler.step(optimizer)
        scaler.update()
        after = torch.cat([w.detach().flatten() for w in weights])
        yield _nonfinite_counts(asked["scaler"], step, "weights", "weights", after)
        yield Reading("loss", str(step), float(seen["loss"].detach()))
        yield Reading("scale", str(step), scale)
        yield Reading("moved", str(step), float((after != before).any()))


def _nonfinite_counts(
    series: str, step: int, place: str, phase: str, tensor: Tensor | None
) -> NonFiniteCounts:
    assert tensor is not None
    flat = tensor.detach().flatten().float()
    finite = flat[torch.isfinite(flat)].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    assert math.isfinite(largest)
    nan, inf = int(torch.isnan(flat).sum()), int(torch.isinf(flat).sum())
    return NonFiniteCounts(series, step, place, phase, flat.numel(), nan, inf, largest)
