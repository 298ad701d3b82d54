"""One call of an op below autocast, as the instruments pass it around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class OpCall:
    """What the dispatcher was given. ``tensors`` are all tensors among the arguments."""

    func: Any  # torch.ops.aten.addmm.default
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    node: Any  # the autograd node that runs now; None in the forward pass
    before: Tensor | None  # a copy of a half tensor that the op has changed in place

    @property
    def name(self) -> str:
        """ "addmm", "add_" """
        found: str = self.func._opname
        return found
