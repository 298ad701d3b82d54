"""A value that no precision computes: a division by zero, the logarithm of zero, a loss that is
infinite by definition. fp32 fails at the same op, line and step, for the same reason. So it does at
a derivative that is infinite or undefined where the function itself is finite.
"""

from __future__ import annotations

import math

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import (
    DIVISIONS,
    LOGARITHMS,
    Arrives,
    ForwardClass,
    forward_class,
    root_op,
)
from ampscope.analysis.run_view import RunView
from ampscope.observations import BadOp

_IMPOSSIBLE = ("_ctc_loss", "_cudnn_ctc_loss")  # no alignment of the target has a probability
_SINGULAR = DIVISIONS | LOGARITHMS | {"floor_divide", "remainder", "fmod", "atanh", "digamma"}
VARIANCES = frozenset({"std", "var", "std_mean", "var_mean"})
_LINEAR_ALGEBRA = ("linalg_", "_linalg_", "inverse", "cholesky", "lu_", "triangular_solve")
ORDINARY = 1e15  # products of two such numbers, and any sum of those, are finite in fp32
_OWN_RULES = (ForwardClass.EMPTY, ForwardClass.MASKED_ROW, ForwardClass.MASK)


def shared_singularity(evidence: Evidence) -> BadOp | None:
    """The root op of the baseline run, when it is singular and fp32's own, at the same step; of
    fp32 where the baseline run went on."""
    if evidence.fp32 is None or evidence.root is None:
        return None
    op = evidence.root.op
    is_left_out = "where" in op.consumers or has_no_value(op)
    if evidence.root.arrives is Arrives.GRADIENT and is_left_out:
        return None  # its value is discarded, and its gradient is not: masked_branch_gradient
    if op.phase == "backward" or forward_class(op) in _OWN_RULES or not is_singular(op):
        return None
    wanted = (op.line, op.phase, op.op.rstrip("_"), op.step)
    for other in evidence.fp32.bad_ops:
        found = (other.line, other.phase, other.op.rstrip("_"), other.step)
        if found == wanted and is_singular(other):
            return op
    return None


def is_singular(op: BadOp) -> bool:
    """The op is not defined where its input is: at zero, or beyond the domain of a logarithm."""
    if op.kind != "nonfinite":
        return False
    if is_impossible_alignment(op):
        return True
    name = op.op.rpartition(".")[2]
    if name in VARIANCES:
        # Of finite numbers fp32 gives NaN only where there is one element: n - 1 is 0.
        return op.nan > 0 and op.fp32_finite is False and op.fp32_max is None
    if name not in _SINGULAR:
        undefined = op.nan > 0 or name.startswith(_LINEAR_ALGEBRA)
        return undefined and has_no_value(op)
    at = 1 if name.startswith(("div", "true_divide", "floor_divide", "remainder", "fmod")) else 0
    if len(op.inputs) <= at:
        return 0.0 in op.scalars
    return op.inputs[at].zeros > 0 or (name in LOGARITHMS and op.nan > 0)


def has_no_value(op: BadOp) -> bool:
    """Whether the op has no finite result in fp32 either, out of finite inputs of ordinary size: it
    is the point at which it is asked, a zero, a singular matrix or two equal singular values, and
    not the magnitude of what went in."""
    sizes = [o.max_abs or 0.0 for o in op.inputs]
    return op.kind == "nonfinite" and op.fp32_finite is False and max(sizes, default=0.0) < ORDINARY


def is_singular_derivative(op: BadOp) -> bool:
    """A backward op whose result does not exist in any precision, out of ordinary inputs."""
    return op.phase == "backward" and has_no_value(op)


def breaks_at_a_point(run: RunView) -> BadOp | None:
    """The op that first gave a value that no precision computes and sent it into the gradients
    alone: a derivative that does not exist there, or a value that the script leaves out of its
    loss. Its step's loss is finite. None where the run's gradients break for another reason."""
    root = root_op(run)
    if root is None or root.arrives is not Arrives.GRADIENT or not has_no_value(root.op):
        return None
    losses = [a.loss for a in run.steps if a.step == root.op.step and a.loss is not None]
    return root.op if all(map(math.isfinite, losses)) else None


def is_impossible_alignment(op: BadOp) -> bool:
    """A CTC loss that is infinite: the input is shorter than its target needs."""
    return op.op.rpartition(".")[2] in _IMPOSSIBLE and op.pos_inf > 0
