"""Lesson 6: the LeNet of many tutorials in fp32, as ``model.half()`` and under autocast.

    ways     fp32 | model.half() | model.half() with a larger eps (Adam) | autocast + GradScaler
    a step   loss; how many weights had a gradient, and how many of those moved
    step 0   how many weights model.half() made infinite, and how many NaN
    beside   Adam's eps and squared gradient as fp16 has them; BatchNorm's running variance

The network is that of PyTorch's "Neural Networks" tutorial, on handwritten digits; every way starts
from the same weights and sees the same batches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.records import Curve, Reading, Result
from ampscope.workloads.training_data import enlarge, read_digits

INFO = LessonInfo(
    id="half",
    number=6,
    title="Why model.half() fails",
    icon="content_cut",
    sentence="The LeNet of many tutorials, trained as they write it and as it should be.",
    settings={"optimizer": ("adam", "sgd")},
    revision=3,
)
STEPS, BATCH = 60, 32
# The largest power of ten at which this network learns by SGD with momentum in fp32 without
# overshooting: a comparison with a training that stands still would show nothing.
SGD_LR = 1e-2
EPS, LARGER_EPS = 1e-8, 1e-4  # torch's default, and what half models are patched with
HELD_OUT = 300
DEVIATIONS = (1.0, 10.0, 100.0, 300.0, 1000.0)  # of what BatchNorm is fed


class LeNet(nn.Module):
    """(batch, 1, 28, 28) -> (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        logits: Tensor = self.fc3(x)
        return logits


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train it."""

    name: str
    is_half: bool = False
    is_autocast: bool = False
    eps: float = EPS


FP32, HALF = Way("fp32"), Way("model.half()", is_half=True)
PATCHED = Way("model.half(), eps=1e-4", is_half=True, eps=LARGER_EPS)
AMP = Way("autocast + GradScaler", is_autocast=True)


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """Every way's training, then the numbers behind its failure."""
    images, labels = read_digits()
    images = enlarge(images)
    # Mean 0 and standard deviation 1, as the tutorials' own data.
    data = ((images - images.mean()) / images.std()).to(device), labels.to(device)
    model = LeNet().to(device)
    uses_adam = asked["optimizer"] == "adam"
    for way in (FP32, HALF, PATCHED, AMP) if uses_adam else (FP32, HALF, AMP):
        yield from _trained(way, copy.deepcopy(model), uses_adam, data)
    yield Reading("eps", "fp32", EPS)
    yield Reading("eps", "fp16", float(torch.tensor(EPS).half()))
    yield Reading("eps, larger", "fp16", float(torch.tensor(LARGER_EPS).half()))
    yield from _running_variance(device)


def _trained(
    way: Way, model: nn.Module, uses_adam: bool, data: tuple[Tensor, Tensor]
) -> Iterator[Result]:
    if way.is_half:
        model.half()
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(parameters, lr=1e-3, eps=way.eps)
        if uses_adam
        else torch.optim.SGD(parameters, lr=SGD_LR, momentum=0.9)
    )
    device = data[0].device.type
    scaler = torch.amp.GradScaler(device, enabled=way.is_autocast)
    losses, moved, with_gradient = [], [], []
    an_epoch = (len(data[0]) - HELD_OUT) // BATCH
    for step in range(STEPS):
        first = step % an_epoch * BATCH
        images, labels = (part[first : first + BATCH] for part in data)
        before = [p.detach().clone() for p in parameters]
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16, enabled=way.is_autocast):
            loss = F.cross_entropy(model(images.half() if way.is_half else images), labels)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if step == 0 and way is HALF:
            yield from _squares(parameters)
        scaler.step(optimizer)
        scaler.update()
        if step == 0 and way is HALF:
            yield from _nonfinite(parameters)
        losses.append(float(loss.detach()))
        with_gradient.append(
            sum(int((p.grad != 0).sum()) for p in parameters if p.grad is not None)
        )
        pairs = zip(parameters, before, strict=True)
        moved.append(sum(_moved(p, b) for p, b in pairs))
    steps = tuple(map(float, range(STEPS)))
    yield Curve("loss", way.name, steps, tuple(losses))
    yield Curve("moved", way.name, steps, tuple(map(float, moved)))
    yield Curve("with a gradient", way.name, steps, tuple(map(float, with_gradient)))
    yield Reading("accuracy", way.name, _accuracy(model, way, data))


def _moved(parameter: nn.Parameter, before: Tensor) -> int:
    """Weights with a gradient that went to another number; NaN is no place to move to."""
    after = parameter.detach()
    grad = parameter.grad
    assert grad is not None
    return int(((after != before) & torch.isfinite(after) & (grad != 0)).sum())


def _squares(parameters: list[nn.Parameter]) -> Iterator[Reading]:
    """Adam divides by the root of the mean square of the gradient: how many squares are zero."""
    gradients = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    nonzero = gradients[gradients != 0]
    # Adam's second moment after one step, (1 - beta2) g^2, as the half optimizer state holds it.
    second = (0.001 * nonzero.float() ** 2).half()
    yield Reading("gradients", "model.half()", int(nonzero.numel()))
    yield Reading("squares that are zero", "model.half()", int((second == 0).sum()))


def _nonfinite(parameters: list[nn.Parameter]) -> Iterator[Reading]:
    """m / 0 is Inf, and 0 / 0, where the gradient itself is zero, is NaN."""
    weights = torch.cat([p.detach().flatten() for p in parameters])
    yield Reading("infinite weights", "model.half()", int(torch.isinf(weights).sum()))
    yield Reading("NaN weights", "model.half()", int(torch.isnan(weights).sum()))


def _accuracy(model: nn.Module, way: Way, data: tuple[Tensor, Tensor]) -> float:
    images, labels = (part[-HELD_OUT:] for part in data)
    model.eval()
    with torch.no_grad():
        guess = model(images.half() if way.is_half else images).argmax(1)
    return float((guess == labels).float().mean())


def _running_variance(device: torch.device) -> Iterator[Curve]:
    """BatchNorm's own estimate of the variance, after one batch of ever larger numbers."""
    numbers = torch.randn(4096, 1, device=device)
    numbers = (numbers - numbers.mean()) / numbers.std()
    for name, dtype in (("fp32", torch.float32), ("model.half()", torch.float16)):
        found = []
        for deviation in DEVIATIONS:
            norm = nn.BatchNorm1d(1, momentum=1.0, device=device).to(dtype)
            norm((numbers * deviation).to(dtype))
            assert norm.running_var is not None
            found.append(float(norm.running_var))
        yield Curve("running variance", name, DEVIATIONS, tuple(found))
