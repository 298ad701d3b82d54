"""A built-in workload from its name, size and seed; bit for bit the same one each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ampscope.errors import BadInput
from ampscope.workloads import gpt, lenet, mlp, resnet, rnn
from ampscope.workloads.catalog import BUILTIN, unknown_workload
from ampscope.workloads.protocol import Workload
from ampscope.workloads.scaling import with_loss_factor

_BUILDERS: Mapping[str, Callable[[str, int], Workload]] = {
    "gpt": gpt.build,
    "lenet": lenet.build,
    "resnet": resnet.build,
    "mlp": mlp.build,
    "rnn": rnn.build,
}


def build_builtin(
    name: str, size: str = "tiny", seed: int = 0, loss_factor: float = 1.0
) -> Workload:
    """The workload, on the CPU and in fp32. Seeds torch's global generator with `seed`.

    With `loss_factor` the loss is multiplied and the optimizer makes up for it (see `scaling`).
    Raises BadInput for a name, size or factor that there is not.
    """
    if name not in BUILTIN:
        raise BadInput(unknown_workload(name))
    if size not in BUILTIN[name].sizes:
        sizes = ", ".join(BUILTIN[name].sizes)
        raise BadInput(f"Workload {name!r} has no size {size!r}. Choose one of: {sizes}.")
    torch.manual_seed(seed)
    workload = replace(_BUILDERS[name](size, seed), name=f"{name}-{size}")
    return with_loss_factor(workload, loss_factor)
