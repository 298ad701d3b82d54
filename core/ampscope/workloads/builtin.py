"""A built-in workload from its name, size and seed; bit for bit the same one each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ampscope.errors import BadInput
from ampscope.workloads import digit_models, text_models
from ampscope.workloads.catalog import BUILTIN, unknown_workload
from ampscope.workloads.protocol import Batch, Workload

_BUILDERS: Mapping[str, Callable[[str, int], Workload]] = {
    "gpt": text_models.build_gpt,
    "lenet": digit_models.build_lenet,
    "resnet": digit_models.build_resnet,
    "mlp": digit_models.build_mlp,
    "rnn": text_models.build_rnn,
}


def build_builtin(
    name: str, size: str = "tiny", seed: int = 0, loss_factor: float = 1.0
) -> Workload:
    """The workload, on the CPU and in fp32. Seeds torch's global generator with `seed`.

    With `loss_factor` the loss is multiplied and the optimizer makes up for it
    (`with_loss_factor`). Raises BadInput for a name, size or factor that there is not.
    """
    if name not in BUILTIN:
        raise BadInput(unknown_workload(name))
    if size not in BUILTIN[name].sizes:
        sizes = ", ".join(BUILTIN[name].sizes)
        raise BadInput(f"Workload {name!r} has no size {size!r}. Choose one of: {sizes}.")
    torch.manual_seed(seed)
    workload = replace(_BUILDERS[name](size, seed), name=f"{name}-{size}")
    return with_loss_factor(workload, loss_factor)


# The same training with its loss multiplied by a factor: a lesson on gradient underflow.
#
# Half precision does not lose gradients because a model is deep or bad but because they are small,
# and a loss that is a mean over much, or one weighted by 1e-6, makes them small.
# `with_loss_factor` multiplies the loss and changes the optimizer so that in exact arithmetic
# every step moves the weights as before; what then differs is precision alone. A power of two
# changes no fp32 bit as long as nothing leaves fp32's own range.


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
