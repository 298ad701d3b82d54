"""Which recorded ops do arithmetic of the model, and which only name, shape or copy memory.

A trace below autograd is full of views: of the 461 forward calls that the tiny GPT makes in fp32
under fp16 autocast, 420 are `view` and `detach`. Their dtype says nothing on precision.
"""

from __future__ import annotations

from ampscope.records import OpRecord

# Ops that only name, shape, allocate or copy memory: they compute nothing, whatever their dtype.
# The views are those of torch's own list (pytorch.org/docs/stable/tensor_view.html).
NO_ARITHMETIC = frozenset(
    [
        "_reshape_alias", "_reshape_copy", "_to_copy", "_unsafe_view", "alias",
        "as_strided", "chunk", "clone", "contiguous", "copy_", "detach", "diagonal",
        "empty", "empty_like", "expand", "expand_as", "fill_", "full", "full_like",
        "lift_fresh", "movedim", "narrow", "new_empty", "new_empty_strided", "new_zeros",
        "ones", "ones_like", "permute", "reshape", "select", "slice", "split",
        "split_with_sizes", "squeeze", "swapaxes", "t", "transpose", "unbind", "unfold",
        "unsqueeze", "view", "view_as", "zero_", "zeros", "zeros_like",
    ]
)  # fmt: skip
SCALER_PREFIX = "_amp_"  # GradScaler's own kernels: no part of the model


def computes(op: OpRecord) -> bool:
    """True for an op that does arithmetic of the model."""
    name = op.op.rpartition(".")[2]
    is_scalers = name.startswith(SCALER_PREFIX)
    return not (op.is_cast or is_scalers or name in NO_ARITHMETIC)
