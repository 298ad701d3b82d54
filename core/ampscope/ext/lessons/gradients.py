"""Lesson 2: in which powers of two the numbers of a real training lie, in fp32.

Ten training steps in fp32, then one whose activations, output gradients, weight gradients, weights
and updates are counted, every element: nothing rounds them, so they show what a format must hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ampscope.capture.exponent_count import count_into
from ampscope.capture.tensors import floating_tensors
from ampscope.ext.lessons.catalog import LessonInfo
from ampscope.numerics.histogram import RAW_LEN, Raw
from ampscope.records import Histogram, Reading, Result
from ampscope.workloads.load import load
from ampscope.workloads.protocol import iterate, move

INFO = LessonInfo(
    id="gradients",
    number=2,
    title="Where gradients live",
    icon="bar_chart",
    sentence="The gradients of a real model spread over dozens of powers of two, and most are "
    "tiny.",
    settings={"model": ("gpt", "lenet", "resnet")},
)
WARM_UP = 10
Key = tuple[str, int]  # module, number of its call
Gradients = dict[Key, Tensor]


def measure(asked: Mapping[str, str], device: torch.device) -> Iterator[Result]:
    """One histogram a role."""
    workload = load(asked["model"])
    model, batches = workload.model.to(device), iterate(workload)
    optimizer = workload.optimizer(model.parameters())
    activations: list[Tensor] = []
    for step in range(WARM_UP + 1):
        optimizer.zero_grad()
        handles = _keep_outputs(model, activations) if step == WARM_UP else []
        with output_gradients(model) as found:
            loss = workload.loss(model, move(next(batches), device))
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for handle in handles:
            handle.remove()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
    parameters = list(model.parameters())
    roles: dict[str, list[Tensor]] = {
        "activations": activations,
        "output gradients": list(found.values()),
        "weight gradients": [p.grad for p in parameters if p.grad is not None],
        "weights": [p.detach() for p in parameters],
        "weight updates": [p.detach() - b for p, b in zip(parameters, before, strict=True)],
    }
    for role, tensors in roles.items():
        yield Histogram(role, asked["model"], "fp32", tuple(exponents_of(tensors).tolist()))
    yield Reading("loss", asked["model"], float(loss.detach()))


def _keep_outputs(model: nn.Module, kept: list[Tensor]) -> list[torch.utils.hooks.RemovableHandle]:
    def keep(module: nn.Module, inputs: object, output: object) -> None:
        kept.extend(tensor.detach() for tensor in floating_tensors(output))

    leaves = (module for module in model.modules() if not list(module.children()))
    return [leaf.register_forward_hook(keep) for leaf in leaves]


@contextmanager
def output_gradients(model: nn.Module) -> Iterator[Gradients]:
    """The gradients of all module outputs of one backward pass, in the dtype in which they flow.

        with output_gradients(model) as found:
            loss(model, batch).backward()
        found["blocks.0.attention.q", 0]        # of its first call

    Of modules without children: a container hands on what its last child put out.
    """
    found: Gradients = {}
    calls: dict[str, int] = {}

    def keep(key: Key, gradient: Tensor) -> None:
        found[key] = gradient.detach().clone()

    def see(name: str, module: nn.Module, inputs: object, output: object) -> None:
        for tensor in floating_tensors(output):
            if tensor.requires_grad:
                key = name, calls.setdefault(name, 0)
                calls[name] += 1
                tensor.register_hook(partial(keep, key))  # type: ignore[no-untyped-call]  # torch's

    handles = [
        module.register_forward_hook(partial(see, name))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def exponents_of(tensors: Iterator[Tensor] | list[Tensor]) -> Raw:
    """One raw row of all elements."""
    row = np.zeros(RAW_LEN, np.int64)
    for tensor in tensors:
        count_into(tensor.detach(), row)
    return row
