"""An optimizer's own numbers where they are kept in half precision.

Adam divides by sqrt(v) + eps: in fp16 v = g^2 is zero for a gradient below 2^-12.5, and an epsilon
of 1e-8 is zero too, being no more than half of the smallest number, 2^-24.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampscope.analysis.run_view import RunView
from ampscope.numerics.formats import FP16
from ampscope.observations import HalfSite, OptimizerStep

COMPARED = 3  # first steps, in which both runs still have much the same weights
ALIKE = 1.5  # gradient norms of two runs that have not parted yet differ by less than this factor
MIN_DUE = 8.0  # spacings: rounding that keeps the mean leaves all out with a chance of e^-8
FALLS = 0.5  # of what is due; rounding to nearest takes at least 2/3 of a fall beyond a spacing
MIN_LOST = 0.01  # of the second moments that came back
TOO_LARGE = 10.0  # update norm over the fp32 control's, in the first steps
LEAPS = 3.0  # times the usual update norm
NEAR = 10  # steps before that say what is usual
SETTLED = 20  # steps after which a fresh second moment is one
FELT = 5  # steps over which the loss is looked at
RISES = 0.05  # of the usual loss, and beyond its scatter
SCATTER = 2.0  # standard deviations
CONTROL = "the fp32 control's"
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


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Moments in fp32 that came back through half precision, as out of a checkpoint, with losses:
    second moments that are zero, or moments that are infinite."""

    first: OptimizerStep  # the first step that used them
    leap: float | None  # its update norm over the usual one; None where none is known
    beside: str  # whose the usual one is
    loss_before: float | None  # usual; None where the loss rose no further than it scatters
    loss_after: float | None
    was_last: bool  # no loss follows that could tell

    @property
    def harms(self) -> bool:
        """The loss rose, or would after so large a step; or moments are infinite, whose weights
        stand still from then on."""
        leaps = self.was_last and (self.leap or 0.0) > TOO_LARGE
        return self.loss_after is not None or leaps or bool(self.first.state_nonfinite)


def round_trip(run: RunView, fp32: RunView | None) -> RoundTrip | None:
    """The first such step that is far larger than usual; None where there is none.

    v = g^2 of a gradient below 2^-12.5 is zero in fp16. After the load v is (1 - beta2) * g^2
    alone, and m / sqrt(v) for beta2 = 0.999 more than thirty times what it was.
    """
    for place, step in enumerate(run.steps):
        if step.skipped or step.grad_nonfinite:
            continue
        if not step.written_in and (dtype := _flushed_in(run.sites, step)):
            step = replace(step, written_in=dtype)
        if not step.written_in:
            continue
        infinite = bool(step.state_nonfinite) and "fp16" in step.written_in
        if not infinite and (step.written_zero_share or 0.0) < MIN_LOST:
            continue
        found = _first_step_of(run.steps, place, step, fp32)
        if infinite or (found.leap or 0.0) > LEAPS:
            return found
    return None


def _flushed_in(sites: Sequence[HalfSite], step: OptimizerStep) -> str:
    """The format in which moments became zero before ``step``, where none is left to show it."""
    casts = (s for s in sites if s.role == "moments" and s.step <= step.step and s.zeroed)
    return next((s.dtype for s in casts if s.zeroed >= MIN_LOST * s.elements), "")


def _first_step_of(
    steps: Sequence[OptimizerStep], place: int, first: OptimizerStep, fp32: RunView | None
) -> RoundTrip:
    """Compared with the fp32 control where that kept the moments in fp32; else with the steps
    before; else, in a process that only resumes, with its own later ones."""
    taken = [a for a in steps if not a.skipped]
    at = next(n for n, a in enumerate(taken) if a is steps[place])
    after = _losses(taken[at + 1 : at + 1 + FELT])
    control = [] if fp32 is None else [a for a in fp32.steps if not a.skipped]
    same = next((n for n, a in enumerate(control) if a.step == first.step), None)
    if same is not None and not control[same].written_zero_share and _alike(first, control[same]):
        beside, usual = CONTROL, control[same : same + 1]
        losses = _losses(control[same + 1 : same + 1 + FELT])
    elif at >= NEAR:
        beside, usual = "that of the steps before", taken[at - NEAR : at]
        losses = _losses([*usual, first])
    else:
        beside, usual = "that of later steps", taken[at + SETTLED :][: 2 * NEAR]
        losses = _losses([first, *usual])
    norms = [a.update_norm for a in usual if a.update_norm]
    own, middle = first.update_norm, statistics.median(norms) if norms else 0.0
    leap = own / middle if own and middle and math.isfinite(own) else None
    felt: tuple[float | None, float | None] = None, None
    if after and len(losses) > 2:
        before, reached = _mean(losses), _mean(after)
        scatter = statistics.stdev(losses)
        if beside == CONTROL and len(losses) == len(after) > 1:  # the same batches
            both = zip(after, losses, strict=True)
            scatter = statistics.stdev(a - b for a, b in both) / math.sqrt(len(after))
        if reached > before + max(RISES * abs(before), SCATTER * scatter):
            felt = before, reached
    return RoundTrip(first, leap, beside, felt[0], felt[1], was_last=not after)


def _alike(one: OptimizerStep, other: OptimizerStep) -> bool:
    return (one.loss is not None and one.loss == other.loss) or _same_gradients(one, other)


def _losses(steps: Sequence[OptimizerStep]) -> list[float]:
    return [a.loss for a in steps if a.loss is not None and math.isfinite(a.loss)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
