"""How far an optimizer's step moved the weights: copied before, compared after."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.capture.tensors import readable, unreadable

MAX_NUMEL = 30_000_000  # weights compared before and after a step: 120 MB of fp32 copies


class WeightMotion:
    """The weights of one optimizer before its step."""

    def __init__(self) -> None:
        self._before: list[Tensor | None] | None = None  # None: cannot be read

    def start(self, parameters: list[Tensor]) -> None:
        """The step is about to run."""
        small = sum(p.numel() for p in parameters if not unreadable(p)) <= MAX_NUMEL
        self._before = [_copy(p) for p in parameters] if small else None

    def take(self, parameters: list[Tensor]) -> tuple[float | None, float | None, float | None]:
        """(share of the weights that changed, 2-norm of the change, the change times the
        gradients); None when too many."""
        if self._before is None:
            return None, None, None
        before, self._before = self._before, None
        both = ((p, readable(p), b) for p, b in zip(parameters, before, strict=True))
        pairs = [
            (p, now, b)
            for p, now, b in both
            if now is not None and b is not None and now.shape == b.shape
        ]
        total = sum(now.numel() for _, now, _ in pairs)
        moved = sum(int(torch.ne(now, b).sum()) for _, now, b in pairs)
        square = sum(float((now.double() - b.double()).square().sum()) for _, now, b in pairs)
        expected = sum(_along(p, now, b) for p, now, b in pairs)
        return (moved / total if total else None), math.sqrt(square), expected


def _along(parameter: Tensor, now: Tensor, before: Tensor) -> float:
    """The change of one parameter times its gradient; 0 for a gradient that is not dense."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return 0.0
    values = readable(gradient)
    if values is None or values.shape != now.shape:
        return 0.0
    return float(((now.double() - before.double()) * values.double()).sum())


def _copy(parameter: Tensor) -> Tensor | None:
    values = readable(parameter)
    return None if values is None else values.clone()
