"""Rounding to half precision: of a tensor, with its gradient, and of memory in place.

Two casts, there and back, round the gradient on its way back too, as a half-precision tensor on a
GPU would have it: what is too large becomes Inf, what is too small zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

MARK = "_ampscope_dtype"  # attribute of a tensor that stands for a half-precision one
DTYPES = {"fp16": paddle.float16, "bf16": paddle.bfloat16}
_cast = paddle._C_ops.cast  # bound before anything replaces it


def rounded(tensor: Any, half: str) -> Any:
    """fp32 tensor with values of ``half``, marked; its gradient is rounded in the same way."""
    result = _cast(_cast(tensor, DTYPES[half]), paddle.float32)
    setattr(result, MARK, half)
    return result


def rounded_gradient(tensor: Any, half: str) -> Any:
    """What a cast from ``half`` to fp32 gives: the same values, unmarked; a rounded gradient."""
    return _cast(_cast(tensor, DTYPES[half]), paddle.float32)


def round_memory(memory: NDArray[np.float32], half: str) -> None:
    """Round in place."""
    with np.errstate(over="ignore", invalid="ignore"):
        if half == "fp16":
            memory[:] = memory.astype(np.float16)
            return
    bits = memory.view(np.uint32)
    nan = np.isnan(memory)
    kept = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) & np.uint32(0xFFFF0000)
    kept[nan] = np.uint32(0x7FC00000)
    bits[:] = kept


def dtype_name(tensor: Any, names: dict[Any, str]) -> str:
    """The dtype that a tensor stands for; "" for what is no floating-point tensor."""
    mark = getattr(tensor, MARK, None)
    return mark if mark is not None else names.get(tensor.dtype, "")
