"""What a layer of Keras or an op of TensorFlow computes, in the words of PyTorch's ops.

The rules know an op's kind by those words; what has none here is ``layer``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

_LAYERS = {
    "Dense": "linear",
    "EinsumDense": "einsum",
    "BatchNormalization": "native_batch_norm",
    "LayerNormalization": "native_layer_norm",
    "GroupNormalization": "native_group_norm",
    "RMSNormalization": "rms_norm",
    "UnitNormalization": "linalg_vector_norm",
    "Add": "add",
    "Subtract": "sub",
    "Multiply": "mul",
    "Average": "mean",
    "Concatenate": "cat",
    "Dot": "bmm",
    "Softmax": "softmax",
    "Embedding": "embedding",
    "ReLU": "relu",
    "Dropout": "dropout",
    "Rescaling": "mul",
}
_PREFIXES = {
    "Conv": "convolution",
    "DepthwiseConv": "convolution",
    "SeparableConv": "convolution",
    "MaxPooling": "max_pool2d",
    "AveragePooling": "avg_pool2d",
    "GlobalAveragePooling": "mean",
    "GlobalMaxPooling": "amax",
}
# Operations between the layers of a functional model, and kernels of TensorFlow.
_OPS = {
    "MatMul": "matmul", "BatchMatMul": "bmm", "BatchMatMulV2": "bmm", "BatchMatMulV3": "bmm",
    "Matmul": "matmul", "Einsum": "einsum", "Dot": "dot", "Tensordot": "matmul",
    "Conv1D": "convolution", "Conv2D": "convolution", "Conv3D": "convolution",
    "DepthwiseConv2dNative": "convolution", "Add": "add", "AddV2": "add", "AddN": "add",
    "BiasAdd": "add", "Sub": "sub", "Subtract": "sub", "ConcatV2": "cat", "Pack": "stack",
    "Cast": "_to_copy", "Mul": "mul", "Multiply": "mul", "RealDiv": "div", "Div": "div",
    "DivNoNan": "div", "Divide": "div", "Reciprocal": "reciprocal", "Rsqrt": "rsqrt", "Pow": "pow",
    "Power": "pow", "Square": "square", "SquaredDifference": "square", "Exp": "exp",
    "Expm1": "expm1", "Cosh": "cosh", "Sinh": "sinh", "Log": "log", "Log1p": "log1p", "Sum": "sum",
    "Mean": "mean", "Prod": "prod", "Cumsum": "cumsum", "Var": "var", "Std": "std",
    "Softmax": "_softmax", "LogSoftmax": "_log_softmax", "Softplus": "softplus",
    "UnsortedSegmentSum": "segment_reduce", "AvgPool": "avg_pool2d", "L2Loss": "linalg_vector_norm",
    "FusedBatchNormV3": "native_batch_norm", "Fill": "full", "SelectV2": "where",
    "Reshape": "view", "Transpose": "transpose", "ExpandDims": "unsqueeze", "Squeeze": "squeeze",
}  # fmt: skip


def layer_kind(layer: Any) -> str:
    """Of a layer or operation, by its class or a class that it is derived from."""
    return _kind_of(type(layer))  # type: ignore[arg-type]  # a class is hashable


@cache
def _kind_of(layer_type: type) -> str:
    for kind in layer_type.__mro__:
        name = kind.__name__
        if not kind.__module__.startswith("keras."):
            continue
        if name in _LAYERS:
            return _LAYERS[name]
        for prefix, op in _PREFIXES.items():
            if name.startswith(prefix) and name.rstrip("123D").endswith(prefix):
                return op
    return "layer"


def op_kind(name: str) -> str:
    """Of a kernel or an operation between layers, ``aten.matmul``; its own name when unknown."""
    return f"aten.{_OPS[name]}" if name in _OPS else f"tf.{name}"
