"""Sums in half precision that are not what their terms add up to.

They are seen in three ways, the surest first (:class:`~ampscope.observations.BadOp`): a result far
from fp32's (coarse), a running total whose rounding errors add up (drift), and a running total that
an addition leaves as it is (stall).
"""

from __future__ import annotations

from ampscope.analysis.run_view import RunView
from ampscope.analysis.weight_averages import is_average
from ampscope.observations import BadOp

MIN_STALLS = 8  # times that the same line added without effect: not a coincidence


def worst_sum(run: RunView) -> BadOp | None:
    """The sum that is farthest off, of the surest kind there is; averages of weights left out."""
    coarse = [b for b in run.bad_ops if b.kind == "coarse"]
    totals = [b for b in run.bad_ops if b.kind in ("drift", "stall") and not is_average(b)]
    drifts = [b for b in totals if b.kind == "drift"]
    stalls = [
        b for b in totals if b.kind == "stall" and b.count >= MIN_STALLS and _is_running_total(b)
    ]
    if coarse or drifts:
        return max(coarse or drifts, key=lambda b: b.error or 0.0)
    return max(stalls, key=lambda b: b.count, default=None)


def _is_running_total(op: BadOp) -> bool:
    """The first term is what the same op made before: a running total, not a residual. What a
    backward pass adds out of place are gradients of one tensor's several uses."""
    name = op.op.rpartition(".")[2]
    is_chain = bool(op.inputs and name in op.inputs[0].producers[:3])
    return name.endswith("_") or (is_chain and op.phase != "backward")
