"""How far an optimizer's step moved the weights: copied before, compared after."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.capture.tensors import plain

MAX_NUMEL = 30_000_000  # weights compared before and after a step: 120 MB of fp32 copies


class WeightMotion:
    """The weights of one optimizer before its step."""

    def __init__(self) -> None:
        self._before: list[Tensor] | None = None

    def start(self, parameters: list[Tensor]) -> None:
        """The step is about to run."""
        small = sum(p.numel() for p in parameters) <= MAX_NUMEL
        self._before = [p.detach().clone() for p in parameters] if small else None

    def take(self, parameters: list[Tensor]) -> tuple[float | None, float | None, float | None]:
        """(share of the weights that changed, 2-norm of the change, the change times the
        gradients); None when too many."""
        if self._before is None:
            return None, None, None
        pairs = list(zip(parameters, self._before, strict=True))
        self._before = None
        total = sum(p.numel() for p, _ in pairs)
        moved = sum(int(torch.ne(p.detach(), b).sum()) for p, b in pairs)
        square = sum(float(_apart(p.detach(), b).square().sum()) for p, b in pairs)
        expected = sum(_along(p, b) for p, b in pairs)
        return (moved / total if total else None), math.sqrt(square), expected


def _along(parameter: Tensor, before: Tensor) -> float:
    """The change of one parameter times its gradient; 0 for a gradient that is not dense."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return 0.0
    return float((_apart(parameter.detach(), before) * plain(gradient).double()).sum())


def _apart(one: Tensor, other: Tensor) -> Tensor:
    return plain(one).double() - plain(other).double()
