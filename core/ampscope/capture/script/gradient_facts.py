"""Counts and magnitudes of an optimizer's gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ampscope.capture.tensors import readable


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


def gradient_facts(parameters: list[Tensor], factor: float) -> GradientFacts:
    """Facts about ``parameter.grad / factor`` of those that have a gradient that can be read."""
    held = ((p, readable(p.grad)) for p in parameters if p.grad is not None)
    parts = tuple((p, _part(values, factor)) for p, values in held if values is not None)
    only = [part for _, part in parts]
    return GradientFacts(
        parts=parts,
        total=sum(p.total for p in only),
        zero=sum(p.zero for p in only),
        nonfinite=sum(p.nonfinite for p in only),
        largest=max((p.largest for p in only), default=None),
        norm=math.sqrt(sum(p.norm**2 for p in only)) if only else None,
    )


def _part(values: Tensor, factor: float) -> Part:
    finite = torch.isfinite(values)
    kept = values.float()[finite].abs()
    scale = factor or 1.0
    return Part(
        total=values.numel(),
        zero=int((values == 0).sum()),
        nonfinite=values.numel() - int(finite.sum()),
        norm=float(torch.linalg.vector_norm(kept, dtype=torch.float64)) / scale,
        largest=float(kept.max()) / scale if kept.numel() else 0.0,
    )
