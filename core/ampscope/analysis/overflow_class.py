"""Which kind of forward failure a bad op is, by what it computes and what went in.

The classes exclude each other, so at most one of the forward causes is named for one root op.
"""

from __future__ import annotations

import math
from enum import StrEnum

from ampscope.analysis.root_op import (
    ADDITIONS,
    CASTS,
    DIVISIONS,
    FILLS,
    LOGARITHMS,
    MATMULS,
    REDUCTIONS,
    feeds_softmax,
)
from ampscope.formats import FORMATS
from ampscope.observations import BadOp

_COUNTED = frozenset(
    ["sum", "count_nonzero", "bincount", "index_add", "index_add_", "scatter_add", "scatter_add_"]
)
# What these give may be zero, and is no number of elements.
_NO_COUNTS = frozenset(
    ["sqrt", "rsqrt", "norm", "linalg_vector_norm", "std", "var", "pow", "mse_loss", "mean", "exp",
     "sub", "amax", "max", "amin", "min", "reciprocal", "sigmoid", "dot", "mm"]
)  # fmt: skip
_PASSED_ON = frozenset(
    ["_to_copy", "to", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand",
     "detach", "clone", "select", "slice", "transpose", "permute", "t"]
)  # fmt: skip


class ForwardClass(StrEnum):
    """What went wrong in one op of the forward pass."""

    ACTIVATION = "activation_overflow"
    ATTENTION = "attention_logit_overflow"
    MASK = "mask_constant_overflow"
    MASKED_ROW = "fully_masked_row"
    ELEMENTWISE = "elementwise_overflow"
    REDUCTION = "reduction_overflow"
    LOG_ZERO = "log_zero_saturation"
    EPS = "norm_eps_underflow"
    EMPTY = "empty_loss_reduction"
    OTHER = ""


def forward_class(op: BadOp) -> ForwardClass:
    """Class of a forward bad op; OTHER when the evidence fits none."""
    name = op.op.rpartition(".")[2]
    if "softmax" in name:
        return ForwardClass.MASKED_ROW
    if name in LOGARITHMS:
        return ForwardClass.LOG_ZERO if _has_zero(op) else ForwardClass.OTHER
    if _is_empty(op, name):
        return ForwardClass.EMPTY
    if name in DIVISIONS and _divides_by_zero(op, name):
        return ForwardClass.EPS
    if _is_mask_constant(op, name):
        return ForwardClass.MASK
    if name in MATMULS:
        return ForwardClass.ATTENTION if _is_attention(op, name) else ForwardClass.ACTIVATION
    if name in REDUCTIONS:
        return ForwardClass.REDUCTION
    # A layer of Keras or Paddle whose ops are not recorded, or a kernel of TensorFlow whose kind is
    # not known here: its output overflowed, and no more is said.
    if name in CASTS or name in ADDITIONS or name == "layer" or op.op.startswith("tf."):
        return ForwardClass.ACTIVATION
    return ForwardClass.ELEMENTWISE


def _is_attention(op: BadOp, name: str) -> bool:
    """A product of two activations whose result goes into a softmax.

    A product with a parameter (a linear layer) is an activation, even right before a softmax.
    """
    two_activations = not any(o.is_parameter for o in op.inputs)
    return (
        name in ("bmm", "baddbmm", "matmul", "mm", "einsum")
        and two_activations
        and feeds_softmax(op)
    )


def _has_zero(op: BadOp) -> bool:
    return any(o.zeros for o in op.inputs)


def _divides_by_zero(op: BadOp, name: str) -> bool:
    """The denominator (or the argument of rsqrt, reciprocal, a negative power) is exactly zero."""
    at = 1 if name in ("div", "div_", "true_divide") else 0
    if name == "pow" and not any(s < 0 for s in op.scalars):
        return False
    return len(op.inputs) > at and op.inputs[at].zeros > 0


def _is_empty(op: BadOp, name: str) -> bool:
    """A mean over nothing: no elements, or nothing divided by a count that is zero."""
    if name in ("mean", "var", "std", "nll_loss_forward", "nll_loss2d_forward") and op.nan:
        empty = any(math.prod(o.shape) == 0 for o in op.inputs)
        return empty or name.startswith("nll_loss")
    if name in ("div", "true_divide", "div_") and len(op.inputs) == 2:
        count = op.inputs[1]
        if math.prod(count.shape) == 1:
            made_by = next((n for n in count.producers if n not in _PASSED_ON), "")
            is_count = op.phase != "backward" and made_by not in _NO_COUNTS
            return count.zeros == 1 and op.total == 1 and is_count
        return _divides_nothing_by_counts(op)
    return False


def _divides_nothing_by_counts(op: BadOp) -> bool:
    """Means of several groups, some of which are empty: 0 / 0 and no other trouble. A count is a
    sum of ones: whole numbers, which what half precision has flushed to zero would not be."""
    total, count = op.inputs
    made_by = next((name for name in count.producers if name not in _PASSED_ON), "")
    sizes = (count.min_abs, count.max_abs)
    is_count = made_by in _COUNTED and all(s is not None and float(s).is_integer() for s in sizes)
    only_empty = 0 < count.zeros <= total.zeros and not op.pos_inf and not op.neg_inf
    return is_count and only_empty and op.nan > 0


def _is_mask_constant(op: BadOp, name: str) -> bool:
    """A huge finite constant meets half: written into the scores, or as a mask that was cast."""
    if name in FILLS and _constant_too_large(op):
        return True
    if not feeds_softmax(op):
        return False
    if name in CASTS:
        return not op.tracked
    small = all((o.max_abs or 0.0) <= 1.0 for o in op.inputs)  # a mask of zeros and ones
    return (
        name in ("mul", "mul_", "add", "sub", "rsub")
        and _constant_too_large(op)
        and (small or name != "mul")
    )


def _constant_too_large(op: BadOp) -> bool:
    """A finite constant beyond the result's format, and no tensor of that size went in."""
    limit = FORMATS[op.dtype].max if op.dtype in FORMATS else math.inf
    return any(math.isfinite(s) and abs(s) > limit for s in op.scalars)
