"""Interventions on every optimizer's step: fp32 masters and state, another learning rate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ampscope.capture.script.optimizer_facts import parameters_of
from ampscope.capture.tensors import HALF

Hook = Callable[[Optimizer, Any, Any], None]


@contextlib.contextmanager
def fp32_state() -> Iterator[None]:
    """Half parameters are stepped as fp32 masters with fp32 state, then rounded back."""
    masters: dict[int, Tensor] = {}
    kept: dict[int, tuple[torch.dtype, Tensor | None]] = {}  # dtype and gradient during the step

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in parameters_of(optimizer):
            if p.dtype not in HALF:
                continue
            master = masters.get(id(p))
            if master is None or not torch.equal(master.to(p.dtype), p.detach()):
                master = p.detach().float()  # first sight, or the script itself wrote to it
            gradient = p.grad
            kept[id(p)] = p.dtype, gradient
            p.grad = None
            p.data = master
            p.grad = None if gradient is None else gradient.float()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in parameters_of(optimizer):
            if id(p) in kept:
                masters[id(p)] = p.data
                dtype, gradient = kept.pop(id(p))
                p.grad = None
                p.data = p.data.to(dtype)
                p.grad = gradient

    with _around_steps(before, after):
        yield


@contextlib.contextmanager
def scaled_lr(factor: float) -> Iterator[None]:
    """Every step uses ``factor`` times its learning rate; schedulers see their own value."""
    kept: dict[int, list[Any]] = {}

    def restore(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        rates = kept.pop(id(optimizer), None)
        for group, lr in zip(optimizer.param_groups, rates or (), strict=rates is not None):
            group["lr"] = lr

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        restore(optimizer, args, kwargs)  # the last step raised before its end
        kept[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if group["lr"] is not None:  # an Adafactor that chooses its own
                group["lr"] = group["lr"] * factor

    with _around_steps(before, restore):
        yield


@contextlib.contextmanager
def _around_steps(before: Hook, after: Hook) -> Iterator[None]:
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
