"""The optimizer's own numbers where they are kept in half precision.

Adam divides by sqrt(v) + eps: in fp16 v = g^2 is zero for a gradient below 2^-12.5, and an epsilon
of 1e-8 is zero too, being no more than half of the smallest number, 2^-24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.formats import FP16
from ampscope.observations import Attempt

COMPARED = 3  # first attempts, in which both runs still have much the same weights
ALIKE = 1.5  # gradient norms of two runs that have not parted yet differ by less than this factor


@dataclass(frozen=True, slots=True)
class HalfState:
    """Of a run whose optimizer keeps its state in half precision."""

    first: Attempt
    broken: Attempt | None  # weights or moments not finite although the gradients are
    dead_share: float  # second moments that vanished although the gradients did not, at most
    eps_vanished: bool
    update_ratio: float | None  # largest update norm over the fp32 control's, in the first attempts


def optimizer_class(run: RunView, name: str) -> str:
    """Class of the optimizer that the records call ``optimizer1``; "" where it is not known."""
    number = name.removeprefix("optimizer")
    known = run.outcome.optimizers
    return known[int(number)] if number.isdecimal() and int(number) < len(known) else ""


def half_state(run: RunView, fp32: RunView | None) -> HalfState | None:
    """None when no optimizer keeps its state in half precision."""
    half = [a for a in run.attempts if "fp16" in a.state_dtypes or "bf16" in a.state_dtypes]
    if not half:
        return None
    return HalfState(
        first=half[0],
        broken=next(
            (a for a in half if (a.weight_nonfinite or a.state_nonfinite) and not a.grad_nonfinite),
            None,
        ),
        dead_share=max(a.state_zero_share or 0.0 for a in half),
        eps_vanished=_vanishes(half[0]),
        update_ratio=_update_ratio(half, fp32),
    )


def _vanishes(attempt: Attempt) -> bool:
    # Half of the smallest number is a tie, which goes to the even neighbour: zero.
    small = attempt.eps is not None and attempt.eps <= FP16.min_subnormal / 2
    return small and "fp16" in attempt.state_dtypes


def _update_ratio(half: Sequence[Attempt], fp32: RunView | None) -> float | None:
    """Where such an optimizer begins late, as in a second phase, it is compared at steps whose
    gradients still are those of the control."""
    if fp32 is None:
        return None
    control = {a.attempt: a for a in fp32.attempts}
    pairs = [(a, control[a.attempt]) for a in half[:COMPARED] if a.attempt in control]
    ratios = [
        a.update_norm / b.update_norm
        for a, b in pairs
        if a.update_norm and b.update_norm and math.isfinite(a.update_norm)
        if a.attempt < COMPARED or _same_gradients(a, b)
    ]
    return max(ratios, default=None)


def _same_gradients(one: Attempt, other: Attempt) -> bool:
    norms = one.grad_norm, other.grad_norm
    if one.optimizer != other.optimizer or not all(n and math.isfinite(n) for n in norms):
        return False
    low, high = sorted(n for n in norms if n)
    return high < ALIKE * low
