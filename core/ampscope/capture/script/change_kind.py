"""How a set of gradients was changed: by one factor, by a factor each, by a clamp, or otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampscope.capture.tensors import HALF

Pair = tuple[Tensor, Tensor]  # a gradient before and after
TOLERANCE = 1e-4  # relative; fp32 rounds at 6e-8, and a factor is often computed in fp32 too
HALF_TOLERANCE = 8e-3  # two roundings to bf16, 2^-8 each


@dataclass(frozen=True, slots=True)
class ChangeKind:
    """See :class:`ampscope.gradient_change.GradientChange`."""

    kind: str
    norm_before: float
    norm_after: float
    max_after: float
    each_norm: float | None


def change_kind(pairs: Sequence[Pair]) -> ChangeKind:
    """Kind of change of ``pairs``, all different, finite and not zero after."""
    tolerance = max(HALF_TOLERANCE if b.dtype in HALF else TOLERANCE for b, _ in pairs)
    norms = [_norm(after) for _, after in pairs]
    largest = max(float(after.abs().max()) for _, after in pairs)
    return ChangeKind(
        kind=_kind(pairs, largest, tolerance),
        norm_before=math.hypot(*(_norm(before) for before, _ in pairs)),
        norm_after=math.hypot(*norms),
        max_after=largest,
        each_norm=norms[0] if max(norms) - min(norms) <= tolerance * max(norms) else None,
    )


def _kind(pairs: Sequence[Pair], largest: float, tolerance: float) -> str:
    factors = [_factor(before, after, tolerance) for before, after in pairs]
    known = [f for f in factors if f is not None]
    if len(known) == len(pairs):
        same = max(known) - min(known) <= tolerance * max(map(abs, known))
        return "factor" if same else "factors"
    if all(_is_clamped(before, after, largest, tolerance) for before, after in pairs):
        return "clamp"
    return "other"


def _factor(before: Tensor, after: Tensor, tolerance: float) -> float | None:
    """The number that ``before`` was multiplied by; None when there is no such number."""
    b, a = before.double(), after.double()
    square = float((b * b).sum())
    if not square:
        return None
    factor = float((a * b).sum()) / square
    residual = float(torch.linalg.vector_norm(a - factor * b))
    return factor if residual <= tolerance * float(torch.linalg.vector_norm(a)) else None


def _is_clamped(before: Tensor, after: Tensor, limit: float, tolerance: float) -> bool:
    expected = before.double().clamp(-limit, limit)
    return bool((after.double() - expected).abs().max() <= tolerance * limit)


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient.double()))
