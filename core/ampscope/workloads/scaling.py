"""The same training with its loss multiplied by a factor: a lesson on gradient underflow.

Half precision does not lose gradients because a model is deep or bad but because they are small,
and a loss that is a mean over much, or one weighted by 1e-6, makes them small. `with_loss_factor`
multiplies the loss and changes the optimizer so that in exact arithmetic every step moves the
weights as before; what then differs is precision alone. A power of two changes no fp32 bit as long
as nothing leaves fp32's own range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ampscope.errors import BadInput
from ampscope.workloads.protocol import Batch, Workload


def with_loss_factor(workload: Workload, factor: float) -> Workload:
    """`workload` with loss * factor and an optimizer that makes up for it; BadInput if it cannot.

    Any optimizer is accepted, but only SGD and Adam/AdamW are corrected.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise BadInput(f"The loss factor must be a positive number, but it is {factor}.")
    if factor == 1.0:
        return workload
    if workload.step is not None:
        raise BadInput(
            f"{workload.name or 'The workload'} has its own training step, which computes the loss "
            "itself, so a loss factor cannot be applied. Use factor 1, or scale inside that step."
        )
    inner_loss, inner_optimizer = workload.loss, workload.optimizer

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return inner_loss(model, batch) * factor

    def optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return _correct(inner_optimizer(parameters), factor)

    return replace(workload, loss=loss, optimizer=optimizer)


def _correct(optimizer: Optimizer, factor: float) -> Optimizer:
    """SGD moves by lr * (g + decay * w); Adam by lr * m / (sqrt(v) + eps), blind to g's unit.

    Decay that Adam adds to the gradient scales with it; AdamW's, which bypasses it, does not.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, SGD):
            group["lr"] /= factor
            group["weight_decay"] *= factor
        elif isinstance(optimizer, Adam):  # AdamW is a subclass
            group["eps"] *= factor
            if not group["decoupled_weight_decay"]:
                group["weight_decay"] *= factor
    return optimizer
