"""Counts and magnitudes of an optimizer's gradients and of its state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.formats import dtype_name


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter's gradient; ``norm`` and ``largest`` are of the finite entries, unscaled."""

    total: int
    zero: int
    nonfinite: int
    norm: float
    largest: float


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """All gradients of an optimizer, divided by the scale that they still carry."""

    parts: tuple[tuple[Tensor, Part], ...]
    total: int
    zero: int
    nonfinite: int
    largest: float | None
    norm: float | None


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Tensors that the optimizer keeps for its parameters."""

    dtypes: str
    nonfinite: int
    zero_share: float | None  # second moments that are zero where the first moment is not


def gradient_facts(parameters: list[Tensor], factor: float) -> GradientFacts:
    """Facts about ``parameter.grad / factor`` of those that have a gradient."""
    parts = tuple((p, _part(p.grad, factor)) for p in parameters if p.grad is not None)
    only = [part for _, part in parts]
    return GradientFacts(
        parts=parts,
        total=sum(p.total for p in only),
        zero=sum(p.zero for p in only),
        nonfinite=sum(p.nonfinite for p in only),
        largest=max((p.largest for p in only), default=None),
        norm=math.sqrt(sum(p.norm**2 for p in only)) if only else None,
    )


def state_facts(optimizer: Optimizer) -> StateFacts:
    """Dtypes, non-finite entries, and vanished second moments of the optimizer's state."""
    tensors: list[Tensor] = []
    dead = alive = 0
    for state in optimizer.state.values():
        own = [
            v for v in state.values() if isinstance(v, Tensor) and v.dim() and v.is_floating_point()
        ]
        tensors += own
        first, second = state.get("exp_avg"), state.get("exp_avg_sq", state.get("square_avg"))
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            moving = first != 0
            alive += int(moving.sum())
            dead += int((moving & (second == 0)).sum())
    return StateFacts(
        dtypes="+".join(sorted({dtype_name(t.dtype) for t in tensors})),
        nonfinite=sum(int((~torch.isfinite(t)).sum()) for t in tensors),
        zero_share=dead / alive if alive else None,
    )


def _part(gradient: Tensor, factor: float) -> Part:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    finite = torch.isfinite(values)
    kept = values.detach().float()[finite].abs()
    scale = factor or 1.0
    return Part(
        total=values.numel(),
        zero=int((values == 0).sum()),
        nonfinite=values.numel() - int(finite.sum()),
        norm=float(torch.linalg.vector_norm(kept, dtype=torch.float64)) / scale,
        largest=float(kept.max()) / scale if kept.numel() else 0.0,
    )
