"""Sums in half precision that are not what their terms add up to.

They are seen in three ways, the surest first (:class:`~ampscope.observations.BadOp`): a result far
from fp32's (coarse), a running total whose rounding errors add up (drift), and a running total that
an addition does not change (stall).
"""

from __future__ import annotations

from ampscope.analysis.run_view import RunView
from ampscope.observations import BadOp

MIN_STAGNATED = 8  # times that the same line added without effect: not a coincidence
MIN_AVERAGE_STAGNATED = 5  # updates of an average of weights that moved next to nothing


def worst_sum(run: RunView) -> BadOp | None:
    """The sum that is farthest off, of the surest kind there is; averages of weights left out."""
    inaccurate = [b for b in run.bad_ops if b.kind == "coarse"]
    totals = [b for b in run.bad_ops if b.kind in ("drift", "stall") and not is_average(b)]
    drifted = [b for b in totals if b.kind == "drift"]
    stagnated = [
        b for b in totals if b.kind == "stall" and b.count >= MIN_STAGNATED and _is_running_total(b)
    ]
    if inaccurate or drifted:
        return max(inaccurate or drifted, key=lambda b: b.error or 0.0)
    return max(stagnated, key=lambda b: b.count, default=None)


def _is_running_total(op: BadOp) -> bool:
    """The first term is what the same op made before: a running total, not a residual. What a
    backward pass adds out of place are gradients of one tensor's several uses."""
    name = op.op.rpartition(".")[2]
    is_chain = bool(op.inputs and name in op.inputs[0].producers[:3])
    return name.endswith("_") or (is_chain and op.phase != "backward")


def stagnated_average(run: RunView) -> BadOp | None:
    """The first addition to an average of weights that had no effect at least
    :data:`MIN_AVERAGE_STAGNATED` times."""
    stagnated = (b for b in run.bad_ops if b.kind == "stall" and b.count >= MIN_AVERAGE_STAGNATED)
    return next(filter(is_average, stagnated), None)


def is_average(op: BadOp) -> bool:
    """Weights are involved: the target, or what is added, is a parameter or made of one."""
    return any(o.is_parameter for o in op.inputs)
