"""Paddle's two names of an op: that of the call and that of the AMP lists.

``paddle._C_ops.sum`` is ``reduce_sum`` in the lists and in Paddle's own operator statistics: C++
translates (phi::TransToFluidOpName) before it looks an op up. A name that is not here is the same
in both. A test compares these with the statistics that Paddle itself collects.
"""

from __future__ import annotations

LISTED = {
    "add": "elementwise_add",
    "bicubic_interp": "bicubic_interp_v2",
    "bilinear_interp": "bilinear_interp_v2",
    "cross_entropy_with_softmax": "softmax_with_cross_entropy",
    "divide": "elementwise_div",
    "embedding": "lookup_table_v2",
    "expand": "expand_v2",
    "flatten": "flatten_contiguous_range",
    "floor_divide": "elementwise_floordiv",
    "fmax": "elementwise_fmax",
    "fmin": "elementwise_fmin",
    "full": "fill_constant",
    "full_like": "fill_any_like",
    "gaussian": "gaussian_random",
    "hardsigmoid": "hard_sigmoid",
    "hardswish": "hard_swish",
    # A CPU build computes F.linear by `linear` (matmul, then add), a CUDA build by `linear_v2`,
    # which is on the white list (nn/functional/common.py).
    "linear": "linear_v2",
    "linear_interp": "linear_interp_v2",
    "matmul": "matmul_v2",
    "matmul_with_flatten": "mul",
    "max": "reduce_max",
    "maximum": "elementwise_max",
    "mean": "reduce_mean",
    "mean_all": "mean",
    "min": "reduce_min",
    "minimum": "elementwise_min",
    "multiply": "elementwise_mul",
    "nearest_interp": "nearest_interp_v2",
    "prod": "reduce_prod",
    "remainder": "elementwise_mod",
    "squeeze": "squeeze2",
    "subtract": "elementwise_sub",
    "sum": "reduce_sum",
    "topk": "top_k_v2",
    "transpose": "transpose2",
    "trilinear_interp": "trilinear_interp_v2",
    "uniform": "uniform_random",
    "unsqueeze": "unsqueeze2",
}

# Operators of Tensor are C++ of their own and go through none of the functions above.
_ARITHMETIC = {
    "add": "elementwise_add",
    "sub": "elementwise_sub",
    "mul": "elementwise_mul",
    "truediv": "elementwise_div",
    "div": "elementwise_div",
    "pow": "elementwise_pow",
    "matmul": "matmul_v2",
}
OPERATORS = {
    **{f"__{side}{name}__": op for name, op in _ARITHMETIC.items() for side in ("", "r")},
    "__mod__": "elementwise_mod",
    "__floordiv__": "elementwise_floordiv",
    "_getitem_dygraph": "slice",
    "clone": "assign",
}

# Ops that move numbers about and change none: what is half going in is half coming out.
MOVING = frozenset((
    "assign", "concat", "expand", "expand_as", "expand_v2", "flatten_contiguous_range", "flip",
    "gather", "gather_nd", "index_select", "masked_select", "pad", "pad3d", "repeat_interleave",
    "reshape", "reshape2", "roll", "slice", "split", "split_with_num", "squeeze2", "stack",
    "strided_slice", "take_along_axis", "tile", "transpose2", "tril", "triu", "unbind",
    "unsqueeze2", "unstack", "view_shape", "where",
))  # fmt: skip

# Their other inputs (scale, bias, statistics) are never cast (AmpAutoCast in eager_amp_auto_cast).
FIRST_INPUT_ONLY = frozenset(("batch_norm", "layer_norm", "sync_batch_norm", "weight_only_linear"))


def listed_name(function: str) -> str:
    """Name in the lists of ``paddle._C_ops.<function>``; in-place ones end with "_"."""
    plain = function[:-1] if function.endswith("_") and not function.startswith("_") else function
    return LISTED.get(plain, plain)


def operator_name(method: str, *, with_number: bool) -> str:
    """Name in the lists of a method of Tensor, whose other operand may be a plain number."""
    name = OPERATORS[method]
    return _WITH_NUMBER.get(method, name) if with_number else name


_WITH_NUMBER = {
    **dict.fromkeys(("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"), "scale"),
    "__truediv__": "div_scale",
    "__div__": "div_scale",
    "__pow__": "pow",
}
