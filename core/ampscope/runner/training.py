"""What a probe trains, ready to run, with a GradScaler that calls the probe when gradients are
complete; and the usual training step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampscope.errors import BadInput
from ampscope.workloads.protocol import Batch, Workload


@dataclass(slots=True)
class ProbeTraining:
    """Everything a step needs, on its device and in its precision."""

    workload: Workload
    model: nn.Module
    optimizer: Optimizer
    scaler: ObservedScaler
    autocast: Callable[[], AbstractContextManager[object]]  # around forward pass and loss
    device: torch.device
    compute_format: str  # "fp16", "bf16" or "fp32": what the precision mode computes in
    real_batch: Callable[[Batch], Batch]  # what the model is fed, of a batch as it came
    shadow_batch: Callable[[Batch], Batch]  # what the fp32 shadow is fed, of the same batch
    # Around a whole step: what fp32 matmuls and convolutions compute in, forward and backward.
    arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext


class ObservedScaler(torch.amp.GradScaler):
    """Calls ``on_gradients`` before gradients are unscaled and ``on_step`` before the step, so that
    a workload's own training step is observed exactly like the default one.

    Both are called with a disabled scaler too, whose four methods are then plain pass-throughs.
    ``on_step`` gets whether the gradients no longer carry the loss scale.
    """

    def __init__(self, device: str, **settings: Any) -> None:
        super().__init__(device, **settings)
        self.on_gradients: Callable[[], None] = _nothing
        self.on_step: Callable[[bool], None] = _nothing
        self._seen: set[int] = set()

    def unscale_(self, optimizer: Optimizer) -> None:
        self._gradients_complete(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        was_unscaled = id(optimizer) in self._seen
        self._gradients_complete(optimizer)
        self.on_step(was_unscaled or not self.is_enabled())
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        self._seen.clear()
        super().update(new_scale)

    def unobserved(self) -> None:
        """Call no listener any more."""
        self.on_gradients = self.on_step = _nothing

    def _gradients_complete(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._seen:
            self._seen.add(id(optimizer))
            self.on_gradients()


def _nothing(*_: object) -> None:
    pass


def training_step(training: ProbeTraining, batch: Batch) -> Tensor:
    """One optimizer step by the workload's own step or by the usual one; the unscaled loss."""
    custom = training.workload.step
    if custom is None:
        return default_step(training, batch)
    with training.arithmetic():
        loss = custom(training.model, batch, training.optimizer, training.scaler, training.autocast)
    return checked_loss(loss, "`step`")


def default_step(
    training: ProbeTraining, batch: Batch, mark: Callable[[], None] = _nothing
) -> Tensor:
    """The usual calls; returns the unscaled loss. ``mark`` is called before the forward pass, the
    backward pass and the optimizer's step, and after it."""
    optimizer, scaler = training.optimizer, training.scaler
    with training.arithmetic():
        mark()
        optimizer.zero_grad(set_to_none=True)
        with training.autocast():
            loss = checked_loss(training.workload.loss(training.model, batch))
        mark()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        mark()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        mark()
    return loss


def checked_loss(loss: object, source: str = "`loss`") -> Tensor:
    """The loss if it can be trained on. Raises BadInput otherwise."""
    if not isinstance(loss, Tensor):
        kind = "None" if loss is None else f"an object of type {type(loss).__name__}"
        raise BadInput(f"{source} of the workload returned {kind}. It must return a scalar tensor.")
    if loss.numel() != 1:
        raise BadInput(
            f"{source} of the workload returned a tensor of shape {tuple(loss.shape)}. Reduce it "
            "to one number, for example with .mean()."
        )
    if source == "`loss`" and not loss.requires_grad:
        raise BadInput(
            "The loss does not depend on any trainable parameter. Check requires_grad and detach()."
        )
    return loss
