"""What a layer computes, in the words of PyTorch's ops that the rules know."""

from __future__ import annotations

import paddle

_nn = paddle.nn
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("linear", ("Linear",)),
    ("convolution", ("Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose",
                     "Conv3DTranspose")),
    ("embedding", ("Embedding",)),
    ("native_layer_norm", ("LayerNorm",)),
    ("native_batch_norm", ("BatchNorm", "BatchNorm1D", "BatchNorm2D", "BatchNorm3D",
                           "SyncBatchNorm")),
    ("native_group_norm", ("GroupNorm",)),
    ("softmax", ("Softmax",)),
    ("log_softmax", ("LogSoftmax",)),
    ("cross_entropy_loss", ("CrossEntropyLoss",)),
    ("mse_loss", ("MSELoss",)),
)  # fmt: skip
_OPS = {getattr(_nn, name): op for op, names in _KINDS for name in names if hasattr(_nn, name)}


def op_of(layer: object) -> str:
    """ "linear", "convolution", …; "layer" for one that is none of these."""
    for kind in type(layer).__mro__:
        if kind in _OPS:
            return _OPS[kind]
    return "layer"
