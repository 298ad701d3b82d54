"""How far the numbers of a run grew before they broke: divergence grows, one bad value does not."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from ampscope.analysis.run_view import RunView

EARLY = (0, 1)  # attempts at which only a growth within the step, over time-steps, can break fp32
BEYOND = 1e30  # a product of this size within one forward pass, near fp32's end of 3.4e38
WITHIN_A_STEP = 1e6  # the growth that is put down for it


TAIL = 0.2  # the last fifth of a run
# On a quadratic loss with its minimum at 0 gradient descent diverges where a step expects to take
# off more than four times the loss: lr * |g|^2 > 4 L is lr * curvature > 2.
OVERSHOOT = 4.0


def overshoots(run: RunView) -> bool:
    """Whether the last steps are too long for their gradients, by the loss's own scale: gradient
    times way is what a step expects to take off the loss. Where that is several times the loss,
    the loss grows for the steps; where it is less, the loss grows for the task. True where
    it is not known."""
    last = run.attempts[-max(1, int(len(run.attempts) * TAIL)) :]
    known = [
        abs(a.expected_change / a.loss)
        for a in last
        if a.expected_change is not None and a.loss and math.isfinite(a.loss) and not a.skipped
    ]
    return not known or statistics.median(known) > OVERSHOOT


def growth(run: RunView, until: int | None = None) -> float:
    """Largest finite loss or gradient norm up to attempt ``until`` over the first one."""
    grown = [1.0]
    seen = [a for a in run.attempts if until is None or a.attempt <= until]
    for series in ([a.loss for a in seen], [a.grad_norm for a in seen]):
        finite = [abs(x) for x in series if x is not None and math.isfinite(x)]
        if len(finite) > 1 and finite[0] > 0:
            grown.append(max(finite) / finite[0])
    in_time = any(b.dtype == "fp32" and (b.fp32_max or 0) > BEYOND for b in run.bad_ops)
    if in_time and run.first_bad_attempt in EARLY:
        grown.append(WITHIN_A_STEP)
    return max(grown)


ROSE = 3.0  # the last losses over the first; a loss that starts below 1 is held against 1
TOO_LONG = 1.0  # a step that goes for more than the whole loss has left what its gradient tells
JUMP = 2.0  # the loss after such a step over the one before; a task that grows does so by the batch


def rise_of_its_steps(run: RunView) -> float | None:
    """How far the loss ended above its start, where too long steps raised it; None of any other.

    Gradient norm times length is what a step expects to take off the loss. A loss that jumps after
    a step that goes for more than the whole of it rises for the steps; where they go for a small
    part of it, or it grows bit by bit, as a critic's whose returns grow, it rises for the task.
    """
    head = next((x for x in run.losses if math.isfinite(x)), None)  # the second may be a blow-up
    tail = run.tail_loss
    if head is None or tail is None or not math.isfinite(tail):
        return None
    if len({a.optimizer for a in run.attempts}) != 1:
        return None  # the losses of several optimizers play against each other
    start = max(abs(head), 1.0)
    if tail <= ROSE * start:
        return None
    until = next((n for n, a in enumerate(run.attempts) if (a.loss or 0.0) > ROSE * start), 0)
    for step, after in pairwise(run.attempts[: until + 1]):
        if not step.grad_norm or not step.update_norm or step.loss is None or after.loss is None:
            continue
        length = step.grad_norm * step.update_norm / max(abs(step.loss), 1.0)
        if length > TOO_LONG and after.loss > JUMP * max(abs(step.loss), start):
            return tail / start
    return None
