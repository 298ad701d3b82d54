"""The root: the first op whose finite inputs gave the non-finite value that the user met.

Marks on tensors tell which bad op a non-finite loss, gradient or evaluation output descends from.
Where nothing non-finite arrives although something was born (an infinity that rsqrt turned into
zero), the bad ops that recur in most steps are suspects, and an intervention has to decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from ampscope.analysis.run_view import RunView
from ampscope.observations import BadOp

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

SEARCH_SPAN = 24  # attempts that a search from 2^24 takes at most


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

    @property
    def name(self) -> str:
        """Without namespace: "addmm"."""
        return self.op.op.rpartition(".")[2]


def root_op(run: RunView) -> RootOp | None:
    """The earliest bad op that reached the loss, else a gradient, else the evaluation."""
    nonfinite = [b for b in run.bad_ops if b.kind == "nonfinite" and not _was_search(run, b)]
    by_time = sorted(nonfinite, key=lambda b: (b.attempt, b.id))
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
    born in a backward pass, or the loss of its own attempt is finite and the gradients are not, as
    behind a `where` that discards the infinity and sends NaN back."""
    return op.phase == "backward" or (
        op.reached_gradient
        and any(
            a.attempt == op.attempt
            and a.grad_nonfinite > 0
            and a.loss is not None
            and math.isfinite(a.loss)
            for a in run.attempts
        )
    )


def _was_search(run: RunView, op: BadOp) -> bool:
    """A backward overflow that a lower scale ended, while other trouble went on: not the root."""
    last_bad = max(run.bad_gradient_attempts, default=-1)
    return (
        op.phase == "backward"
        and op.attempt in run.skips
        and op.last_attempt < min(last_bad, op.attempt + SEARCH_SPAN)
    )


def silent_suspects(run: RunView) -> list[BadOp]:
    """Forward bad ops in half that recur in most attempts and arrive nowhere."""
    needed = max(1, len(run.attempts) // 2)
    return [
        b
        for b in run.bad_ops
        if b.kind == "nonfinite"
        and b.phase == "forward"
        and b.count >= needed
        and b.dtype in ("fp16", "bf16")
        and b.grad_enabled
    ]


def feeds_softmax(op: BadOp) -> bool:
    """Whether the output goes into a softmax through nothing but scaling, masking and views."""
    passing = FILLS | ADDITIONS | {
        "mul", "mul_", "div", "div_", "_unsafe_view", "view", "reshape", "expand", "masked_fill",
        "transpose", "permute", "slice", "unsqueeze", "squeeze", "detach", "tril", "triu", "clone",
        "amax", "max", "sub", "relu", "t", "select", "contiguous", "logical_not",
    }  # fmt: skip
    shifted = False  # a softmax written by hand subtracts the maximum and takes the exponential
    for name in op.consumers:
        if name in ("_softmax", "softmax", "_safe_softmax") or (name == "exp" and shifted):
            return True
        if name not in passing:
            return False
        shifted = shifted or name in ("sub", "amax", "max")
    return False
