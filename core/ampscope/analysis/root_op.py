"""The root: the first op whose finite inputs gave the non-finite value that the user met.

Marks on tensors tell which bad op a non-finite loss, gradient or evaluation output descends from.
Where nothing non-finite arrives although something was born (an infinity that rsqrt turned into
zero), the bad ops that recur in most steps are suspects, and an intervention has to decide.

Which kind of failure a bad op of the forward pass is, says :func:`forward_class`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.run_view import RunView
from ampscope.numerics.formats import FORMATS
from ampscope.observations import INACCURATE_ERROR, BadOp

MATMULS = frozenset(
    [
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear", "convolution",
        "_convolution", "mkldnn_convolution", "convolution_overrideable", "addmv", "mv",
        "dot", "einsum", "convolution_backward", "mkldnn_linear", "mkldnn_rnn_layer",
    ]
)  # fmt: skip
REDUCTIONS = frozenset(
    [
        "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce",
        "embedding_dense_backward", "segment_reduce", "_index_put_impl_", "index_put_",
        "sum", "mean", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm",
        "cumsum", "prod", "logsumexp", "cumprod", "native_layer_norm", "native_group_norm",
        "native_batch_norm", "_native_batch_norm_legit", "amax", "cudnn_batch_norm",
        "nansum", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
        "_cdist_forward", "avg_pool2d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d",
        "dot", "logcumsumexp", "nll_loss_forward",
    ]
)  # fmt: skip
LOGARITHMS = frozenset(
    [
        "log", "log_", "log2", "log10", "log1p", "xlogy", "special_xlogy",
        "log_sigmoid_forward", "logit",
    ]
)  # fmt: skip
DIVISIONS = frozenset(
    [
        "div", "div_", "rsqrt", "rsqrt_", "reciprocal", "true_divide", "reciprocal_", "pow",
    ]
)  # fmt: skip
CASTS = frozenset(["_to_copy", "to", "copy_"])
FILLS = frozenset(
    [
        "masked_fill", "masked_fill_", "where", "full", "fill_", "scalar_tensor",
        "full_like", "new_full", "fill", "lift_fresh_copy", "_to_copy", "clone", "copy_",
    ]
)  # fmt: skip
ADDITIONS = frozenset(
    [
        "add", "add_", "sub", "sub_", "rsub", "cat", "stack",
    ]
)  # fmt: skip

SEARCH_SPAN = 24  # steps that a search from 2^24 takes at most

# Of two tensors, none of which need be a parameter.
PRODUCTS = frozenset(["bmm", "baddbmm", "matmul", "mm", "mv", "einsum"])
SOFTMAXES = frozenset(["_softmax", "softmax", "_safe_softmax"])
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


class Arrives(StrEnum):
    """Where the non-finite value was met."""

    LOSS = "loss"
    GRADIENT = "gradient"
    EVALUATION = "evaluation"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class RootOp:
    """A bad op and where its value arrived."""

    op: BadOp
    arrives: Arrives
    is_latent: bool = False  # what it loses has not made the training worse so far

    @property
    def name(self) -> str:
        """Without namespace: "addmm"."""
        return self.op.op.rpartition(".")[2]


def root_op(run: RunView) -> RootOp | None:
    """The earliest bad op that reached the loss, else a gradient, else the evaluation."""
    nonfinite = [b for b in run.bad_ops if b.kind == "nonfinite" and not _was_search(run, b)]
    by_time = sorted(nonfinite, key=lambda b: (b.step, b.id))
    read_losses = run.taints_of(run.guarded_losses)
    read_gradients = run.taints_of(run.guarded_gradients)
    for arrives, reached in (
        (Arrives.LOSS, [b for b in by_time if b.reached_loss or b.id in read_losses]),
        (Arrives.GRADIENT, [b for b in by_time if b.reached_gradient or b.id in read_gradients]),
        (Arrives.EVALUATION, [b for b in by_time if b.id == run.outcome.eval_taint]),
    ):
        if reached:
            is_gradient = _broke_the_weights_first(run, reached[0])
            return RootOp(reached[0], Arrives.GRADIENT if is_gradient else arrives)
    return None


def _broke_the_weights_first(run: RunView, op: BadOp) -> bool:
    """Whether it reached a later loss only through weights that its gradients had broken: it was
    born in a backward pass, or the loss of its own step is finite and the gradients are not, as
    behind a `where` that discards the infinity and sends NaN back."""
    return op.phase == "backward" or (
        op.reached_gradient
        and any(
            a.step == op.step
            and a.step in run.bad_gradient_steps
            and a.loss is not None
            and math.isfinite(a.loss)
            for a in run.steps
        )
    )


def _was_search(run: RunView, op: BadOp) -> bool:
    """A backward overflow that a lower scale ended, while other trouble went on: not the root."""
    last_bad = max(run.bad_gradient_steps, default=-1)
    return (
        op.phase == "backward"
        and op.step in run.skips
        and op.last_step < min(last_bad, op.step + SEARCH_SPAN)
    )


def silent_suspects(run: RunView) -> list[BadOp]:
    """Forward bad ops in half that recur in most steps and arrive nowhere."""
    needed = max(1, len(run.steps) // 2)
    return [
        b
        for b in run.bad_ops
        if b.kind == "nonfinite"
        and b.phase == "forward"
        and b.count >= needed
        and b.dtype in ("fp16", "bf16")
        and b.grad_enabled
    ]


def swallowed(run: RunView) -> list[BadOp]:
    """Forward bad ops in half whose infinity a later op made finite and wrong."""
    lost = [b for b in run.bad_ops if b.kind == "nonfinite" and (b.lost or 0.0) > INACCURATE_ERROR]
    return [b for b in lost if b.phase == "forward" and b.dtype in ("fp16", "bf16")]


class ForwardClass(StrEnum):
    """What went wrong in one op of the forward pass, by what it computes and what went in. The
    classes exclude each other, so at most one of the forward causes is named for one root op."""

    ACTIVATION = "activation"
    ATTENTION = "attention"
    MASK = "mask constant"
    MASKED_ROW = "masked row"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    LOG_ZERO = "logarithm of zero"
    EPS = "division by zero"
    EMPTY = "mean of nothing"
    OTHER = ""


def forward_class(op: BadOp) -> ForwardClass:
    """Class of a forward bad op; OTHER when the evidence fits none."""
    name = op.op.rpartition(".")[2]
    # A row that is masked whole gives NaN; the infinities of log_softmax are differences too large.
    if "softmax" in name and (op.nan or "log_softmax" not in name):
        return ForwardClass.MASKED_ROW
    if name in LOGARITHMS:
        return ForwardClass.LOG_ZERO if any(o.zeros for o in op.inputs) else ForwardClass.OTHER
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


def _divides_by_zero(op: BadOp, name: str) -> bool:
    """The denominator (or the argument of rsqrt, reciprocal, a negative power) is exactly zero."""
    at = 1 if name in ("div", "div_", "true_divide") else 0
    if name == "pow" and not any(s < 0 for s in op.scalars):
        return False
    return len(op.inputs) > at and op.inputs[at].zeros > 0


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


def _is_attention(op: BadOp, name: str) -> bool:
    """A matmul of two activations whose result goes into a softmax.

    A matmul with a parameter (a linear layer) is an activation, even right before a softmax.
    """
    two_activations = not any(o.is_parameter for o in op.inputs)
    return name in PRODUCTS and two_activations and feeds_softmax(op)


def feeds_softmax(op: BadOp) -> bool:
    """Whether the output goes into a softmax through nothing but scaling, masking and views."""
    passing = FILLS | ADDITIONS | {
        "mul", "mul_", "div", "div_", "_unsafe_view", "view", "reshape", "expand", "masked_fill",
        "transpose", "permute", "slice", "unsqueeze", "squeeze", "detach", "tril", "triu", "clone",
        "amax", "max", "sub", "relu", "t", "select", "contiguous", "logical_not",
    }  # fmt: skip
    shifted = False  # a softmax written by hand subtracts the maximum and takes the exponential
    for name in op.consumers:
        if name in SOFTMAXES or (name == "exp" and shifted):
            return True
        if name not in passing:
            return False
        shifted = shifted or name in ("sub", "amax", "max")
    return False
