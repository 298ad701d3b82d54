"""How far the numbers of a run grew before they broke: divergence grows, one bad value does not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ampscope.analysis.repeatability import difference
from ampscope.analysis.run_view import TAIL_SHARE, RunView
from ampscope.observations import OptimizerStep

EARLY = (0, 1)  # steps at which only a growth within the step, over time-steps, can break fp32
BEYOND = 1e30  # a product of this size within one forward pass, near fp32's end of 3.4e38
WITHIN_A_STEP = 1e6  # the growth that is put down for it
ROSE = 3.0  # the last losses over the first; a loss that starts below 1 is held against 1
FAR = 100.0  # a rise, or a distance from the control, that needs less evidence
LASTING = 3  # steps; a rise that is gone after fewer was a batch's
TOO_LONG = 1.0  # a step that goes for more than the whole loss has left what its gradient tells
SHORT = 0.01  # of the loss; ten steps of a healthy training take off more
JUMP = 2.0  # the loss after such a step over the one before; a task that grows does so by the batch
MOSTLY = 0.5  # of the rise, in powers
# On a quadratic loss with its minimum at 0 gradient descent diverges where a step expects to take
# off more than four times the loss: lr * |g|^2 > 4 L is lr * curvature > 2.
OVERSHOOT = 4.0


def growth(run: RunView, until: int | None = None) -> float:
    """Largest finite loss or gradient norm up to step ``until`` over the first one of the same
    optimizer: a critic's loss says nothing of an actor's."""
    grown = [1.0]
    seen = [a for a in run.steps if until is None or a.step <= until]
    for name in {a.optimizer for a in seen}:
        own = [a for a in seen if a.optimizer == name]
        for series in ([a.loss for a in own], [a.grad_norm for a in own]):
            finite = [abs(x) for x in series if x is not None and math.isfinite(x)]
            if len(finite) > 1 and finite[0] > 0:
                grown.append(max(finite) / finite[0])
    in_time = any(b.dtype == "fp32" and (b.fp32_max or 0) > BEYOND for b in run.bad_ops)
    if in_time and run.first_bad_step in EARLY:
        grown.append(WITHIN_A_STEP)
    return max(grown)


def first_grown(run: RunView, times: float) -> int | None:
    """The first step whose loss or gradient norm is so many times the first one of the same
    optimizer; None where none is finite and that large."""
    first: dict[tuple[str, str], float] = {}
    for step in run.steps:
        for kind, value in (("loss", step.loss), ("norm", step.grad_norm)):
            if value is None or not math.isfinite(value) or not value:
                continue
            start = first.setdefault((step.optimizer, kind), abs(value))
            if abs(value) >= times * start:
                return step.step
    return None


def divergence(run: RunView, control: RunView | None) -> float | None:
    """How far the loss ended above its start because its steps raised it, as a factor; None of a
    loss that did not rise, or that rose for another reason.

    A loss may grow: returns of a better policy are larger, a curriculum becomes harder, one batch
    weighs more than others. The loss of a single batch is no evidence; medians are. A rise counts
    where the control, at the same steps, is far below; where the steps are too long for their
    gradients (:func:`_steps_raised_it`); or where it is large and no step lengths are known.
    """
    losses = run.losses
    first = next((x for x in losses if math.isfinite(x)), None)  # the second may be a blow-up
    if first is None or not all(map(math.isfinite, _last(losses))):
        return None
    start = max(abs(first), 1.0)  # below 1 a loss may well start near zero and grow
    rise = _settled(losses) / start
    if rise <= ROSE:
        return None
    if rise > FAR and control is not None and _far_above(run, control):
        return rise
    if len({a.optimizer for a in run.steps}) != 1 and rise <= FAR:
        return None  # the losses of several optimizers play against each other
    return rise if _steps_raised_it(run, start, rise) else None


def _last(losses: Sequence[float]) -> Sequence[float]:
    """The last fifth."""
    return losses[-max(1, int(len(losses) * TAIL_SHARE)) :]


def _settled(losses: Sequence[float]) -> float:
    """Where the losses ended: the median of the last fifth, or the least of the last few."""
    return max(statistics.median(_last(losses)), min(losses[-LASTING:]))


def _far_above(run: RunView, control: RunView) -> bool:
    """Whether the last losses are a hundred times the control's: batch by batch where both runs
    drew the same batches."""
    count = min(len(run.losses), len(control.losses))
    own, other = _last(run.losses[:count]), _last(control.losses[:count])
    if not own or not all(map(math.isfinite, (*own, *other))):
        return False
    if difference(run, control):
        return _settled(own) > FAR * max(abs(_settled(other)), 1.0)
    return _settled([a / max(abs(b), 1.0) for a, b in zip(own, other, strict=True)]) > FAR


def _steps_raised_it(run: RunView, start: float, rise: float) -> bool:
    """Whether the steps are longer than their gradients tell: gradient times way is what a step
    expects to take off the loss.

    It shows in jumps to a height that the loss had not had and does not leave, after steps that go
    for more than the whole loss, where they make up most of the rise; and at the end, where in the
    median each step goes for several times the loss. Steps that go for a small part of it leave
    the rise to the task. Where no length is known, a large rise counts.
    """
    made = [a for a in run.steps if a.loss is not None and math.isfinite(a.loss)]
    losses = [abs(a.loss or 0.0) for a in made]
    height, raised = start, 0.0
    for n, step in enumerate(made[:-1]):
        height = max(height, _lasting(losses, n))
        jump = _lasting(losses, n + 1) / height
        if jump > JUMP and (_share(step) or 0.0) > TOO_LONG:
            raised += math.log(jump)
    if raised > MOSTLY * math.log(rise):
        return True
    ends = made[-max(1, int(len(made) * TAIL_SHARE)) :]
    shares = [s for a in ends if not a.skipped and (s := _share(a))]
    return statistics.median(shares) > OVERSHOOT if shares else rise > FAR


def lower_rates(run: RunView, until: int | None, count: int = 3) -> list[float]:
    """Powers of ten to try as factors of the learning rate, the largest first. The first step from
    the initial weights goes for a share of the loss in proportion to its rate: factors under which
    that still were an overshoot at the highest rate up to step ``until`` are left out."""
    longest = 0.0
    for name in {a.optimizer for a in run.steps}:
        own = [a for a in run.steps if a.optimizer == name and (until is None or a.step <= until)]
        first = next((a for a in own if not a.skipped and _share(a)), None)
        if first is not None:
            rises = max((a.lr for a in own if a.lr < math.inf), default=0.0) / (first.lr or 1.0)
            longest = max(longest, (_share(first) or 0.0) * (rises if rises > 1 else 1.0))
    needed = math.log10(longest / OVERSHOOT) if 0 < longest < math.inf else 0.0
    least = max(1, math.ceil(needed))
    return [10.0**-n for n in range(least, least + count)]


def rate_may_matter(run: RunView, until: int) -> bool:
    """Whether a lower learning rate could keep the run from what breaks at step ``until``: a step
    before was taken, and not all of them are known to go for a small share of the loss. Steps that
    short leave the weights where any rate would have them."""
    taken = [a for a in run.steps if a.step < until and not a.skipped]
    return any((share := _share(a)) is None or share > SHORT for a in taken)


def _lasting(losses: Sequence[float], place: int) -> float:
    """The loss there, as far as the next ones keep it."""
    return min(losses[place], statistics.median(losses[place : place + LASTING]))


def _share(step: OptimizerStep) -> float | None:
    """What the step goes for, as a share of the loss; None where it is not known. The product of
    the two norms is an upper bound of what gradient times way is. A clip shortens the gradient that
    the step is taken with, not the slope of the loss: its factor is undone."""
    expected = step.expected_change
    if expected is None and step.grad_norm and step.update_norm:
        expected = step.grad_norm * step.update_norm
    if not expected or step.loss is None:
        return None
    slope = step.unclipped_norm or 0.0
    clipped = slope / step.grad_norm if step.grad_norm and math.isfinite(slope) else 1.0
    return abs(expected) * max(clipped, 1.0) / max(abs(step.loss), 1.0)
