"""An optimizer's own numbers where they are kept in half precision.

Adam divides by sqrt(v) + eps: in fp16 v = g^2 is zero for a gradient below 2^-12.5, and an epsilon
of 1e-8 is zero too, being no more than half of the smallest number, 2^-24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.numerics.formats import FP16
from ampscope.observations import OptimizerStep

COMPARED = 3  # first steps, in which both runs still have much the same weights
ALIKE = 1.5  # gradient norms of two runs that have not parted yet differ by less than this factor
MIN_DUE = 8.0  # spacings: rounding that keeps the mean leaves all out with a chance of e^-8
FALLS = 0.5  # of what is due; rounding to nearest takes at least 2/3 of a fall beyond a spacing
RIGID = 20  # taken steps without any sampled second moment that fell, where no decay is known


@dataclass(frozen=True, slots=True)
class HalfState:
    """Of a run whose optimizer keeps its state in half precision."""

    first: OptimizerStep
    broken: OptimizerStep | None  # weights or moments not finite although the gradients are
    dead_share: float  # second moments that vanished although the gradients did not, at most
    eps_vanished: bool
    update_ratio: float | None  # largest update norm over the fp32 control's, in the first steps
    lost_decay: LostDecay | None  # of second moments; None where they fall as they should


@dataclass(frozen=True, slots=True)
class LostDecay:
    """Second moments that rounding keeps from falling. ``due`` and ``done`` are sums of falls over
    sampled moments, in spacings of their format; None where the optimizer's options name no decay,
    and all that is known is that none fell."""

    steps: int  # taken steps at which moments were compared
    decay: float | None = None
    due: float | None = None
    done: float | None = None


def half_state(run: RunView, fp32: RunView | None) -> HalfState | None:
    """None when no optimizer keeps its state in half precision."""
    half = [a for a in run.steps if "fp16" in a.state_dtypes or "bf16" in a.state_dtypes]
    if not half:
        return None
    return HalfState(
        first=half[0],
        broken=next(
            (a for a in half if (a.weight_nonfinite or a.state_nonfinite) and not a.grad_nonfinite),
            None,
        ),
        dead_share=max(a.state_zero_share or 0.0 for a in half),
        # Half of the smallest number is a tie, which goes to the even neighbour: zero.
        eps_vanished="fp16" in half[0].state_dtypes
        and half[0].eps is not None
        and half[0].eps <= FP16.min_subnormal / 2,
        update_ratio=_update_ratio(half, fp32),
        lost_decay=_lost_decay(half),
    )


def _lost_decay(half: Sequence[OptimizerStep]) -> LostDecay | None:
    """Exact falls against those that were seen: stochastic rounding leaves most moments as they
    are at a step, and their sum falls all the same. Without the formula's decay: gradients differ
    from batch to batch, so in fp32 some of the sampled moments fall at every step."""
    seen = [a for a in half if not a.skipped and a.state_fell_share is not None and a.grad_norm]
    decay = next((a.state_decay for a in seen if a.state_decay is not None), None)
    if decay is None:
        fell = len(seen) < RIGID or any(a.state_fell_share for a in seen)
        return None if fell else LostDecay(len(seen))
    due = math.fsum(a.state_fall_due or 0.0 for a in seen)
    done = math.fsum(a.state_fall_done or 0.0 for a in seen)
    is_lost = due >= MIN_DUE and done < FALLS * due
    return LostDecay(len(seen), decay, due, done) if is_lost else None


def _update_ratio(half: Sequence[OptimizerStep], fp32: RunView | None) -> float | None:
    """Where such an optimizer begins late, as in a second phase, it is compared at steps whose
    gradients still are those of the control."""
    if fp32 is None:
        return None
    control = {a.step: a for a in fp32.steps}
    pairs = [(a, control[a.step]) for a in half[:COMPARED] if a.step in control]
    ratios = [
        a.update_norm / b.update_norm
        for a, b in pairs
        if a.update_norm and b.update_norm and math.isfinite(a.update_norm)
        if a.step < COMPARED or _same_gradients(a, b)
    ]
    return max(ratios, default=None)


def _same_gradients(one: OptimizerStep, other: OptimizerStep) -> bool:
    norms = one.grad_norm, other.grad_norm
    if one.optimizer != other.optimizer or not all(n and math.isfinite(n) for n in norms):
        return False
    low, high = sorted(n for n in norms if n)
    return high < ALIKE * low


def optimizer_class(run: RunView, name: str) -> str:
    """Class of the optimizer that the records call ``optimizer1``; "" where it is not known."""
    number = name.removeprefix("optimizer")
    known = run.outcome.optimizers
    return known[int(number)] if number.isdecimal() and int(number) < len(known) else ""
