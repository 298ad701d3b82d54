"""Lesson 7: w + Δ == w. Real weights, steps of every size, each format; then a whole training.

for each step size 2^-k      of weights w of LeNet, normal in fp16: the share with w + w·2^-k == w
bf16, fp16, fp32 weights     an MLP learns from steps that are small beside its weights
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.records import Curve, Reading, Result
from ampscope.workloads.load import load
from ampscope.workloads.protocol import Workload, iterate, move

INFO = LessonInfo(
    id="master",
    number=7,
    title="Master weights",
    icon="save",
    sentence="A step that is small beside its weight is rounded away: w + Δ == w.",
    revision=2,
)
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
EXPONENTS = tuple(range(-28, 1))
STEPS, LR = 300, 2.0**-5


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """One curve a format, then losses and the share of weights that moved."""
    model = load("lenet", size="small").model.to(device)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    # Numbers that are normal in fp16: below, w itself has fewer digits.
    weights = weights[(weights.abs() > 2.0**-10)]
    yield Reading("weights", "LeNet", float(weights.numel()))
    for name, dtype in DTYPES.items():
        shares = [_unchanged(weights.to(dtype), 2.0**e) for e in EXPONENTS]
        yield Curve("unchanged", name, tuple(map(float, EXPONENTS)), tuple(shares))
    workload = load("mlp")
    for name in ("fp32", "bf16", "bf16 with fp32 master weights"):
        yield from _trained(workload, name, device)


def _unchanged(weights: Tensor, relative: float) -> float:
    """Share of weights that w + Δ leaves as they are, the sum rounded once.

    Δ itself is exact: an optimizer's step in the weights' own format is rounded before it is added,
    and the small ones of fp16 are subnormal, which is another effect.
    """
    exact = weights.double() if weights.dtype == torch.float32 else weights.float()
    after = (exact + exact * relative).to(weights.dtype)
    return float((after.float() == weights.float()).float().mean())  # torch compares no fp8


def _trained(workload: Workload, name: str, device: torch.device) -> Iterator[Result]:
    """SGD by hand: three lines that say what is kept in which format."""
    batches = iterate(workload)
    model = copy.deepcopy(workload.model).to(device)
    if name == "bf16":
        model.to(torch.bfloat16)
    parameters = list(model.parameters())
    losses: list[float] = []
    moved = 0
    for _ in range(STEPS):
        images, labels = move(next(batches), device)
        uses_autocast = "master" in name
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=uses_autocast):
            logits = model(images.to(parameters[0].dtype))
        loss = nn.functional.cross_entropy(logits.float(), labels)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                before = parameter.clone()
                parameter.sub_(LR * gradient)
                moved += int((parameter != before).sum())
        losses.append(float(loss.detach()))
    total = STEPS * sum(p.numel() for p in parameters)
    yield Curve("loss", name, tuple(map(float, range(STEPS))), tuple(losses))
    yield Reading("moved", name, moved / total)
