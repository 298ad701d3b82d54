"""What an optimizer holds: parameters, learning rate, state; dtypes and non-finite entries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.tensors import holds_numbers, plain
from ampscope.formats import dtype_name


@dataclass(frozen=True, slots=True)
class StateFacts:
    """Tensors that the optimizer keeps for its parameters."""

    dtypes: str
    nonfinite: int
    zero_share: float | None  # second moments that are zero where the first moment is not


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that the optimizer steps, in its own order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def lr_of(optimizer: Optimizer) -> float:
    """Learning rate of its first group; NaN when it has none (None in Transformers' Adafactor)."""
    rate = option_of(optimizer, "lr")
    return math.nan if rate is None else rate


def option_of(optimizer: Optimizer, name: str) -> float | None:
    """An option of its first group as a number; None where it has none, or several (the two
    ``eps`` of Adafactor)."""
    value = optimizer.param_groups[0].get(name) if optimizer.param_groups else None
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    return None


def has_closure(args: Any, kwargs: Any) -> bool:
    """Whether the arguments of a step hook hold a closure."""
    # The hook's args hold the optimizer itself first.
    return any(callable(a) and not isinstance(a, Optimizer) for a in args) or callable(
        kwargs.get("closure")
    )


def state_facts(optimizer: Optimizer) -> StateFacts:
    """Dtypes, non-finite entries, and vanished second moments of the optimizer's state."""
    tensors: list[Tensor] = []
    dead = alive = 0
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, Tensor) and _is_of_interest(v)]
        first, second = state.get("exp_avg"), state.get("exp_avg_sq", state.get("square_avg"))
        if all(isinstance(m, Tensor) and _is_of_interest(m) for m in (first, second)):
            moving = plain(first) != 0
            alive += int(moving.sum())
            dead += int((moving & (plain(second) == 0)).sum())
    return StateFacts(
        dtypes=dtypes(tensors),
        nonfinite=nonfinite_count(tensors),
        zero_share=dead / alive if alive else None,
    )


def _is_of_interest(state: Tensor) -> bool:
    """Not a step counter, nor a packed state in a subclass of its own."""
    return state.dim() > 0 and state.is_floating_point() and holds_numbers(state)


def dtypes(tensors: list[Tensor]) -> str:
    """Names of the dtypes in use, "fp16+fp32"."""
    return "+".join(sorted({dtype_name(t.dtype) for t in tensors}))


def nonfinite_count(tensors: list[Tensor]) -> int:
    """NaN and infinite entries of all tensors."""
    return sum(int((~torch.isfinite(plain(t))).sum()) for t in tensors)
