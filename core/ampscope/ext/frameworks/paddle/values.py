"""A Paddle tensor as ``TensorBits``: the bits where they lie, or a copy of them.

``Tensor.numpy()`` copies, and a run that counts every layer would copy every activation; on a CPU
the memory is read in place instead. bf16 has no NumPy dtype: its bits are uint16.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from ampscope.ext.frameworks.tensors import TensorBits

NAMES = {
    paddle.float16: "fp16",
    paddle.bfloat16: "bf16",
    paddle.float32: "fp32",
    paddle.float64: "fp64",
}
_LAYOUTS: dict[str, tuple[Any, Any]] = {
    "fp16": (ctypes.c_uint16, np.uint16),
    "bf16": (ctypes.c_uint16, np.uint16),
    "fp32": (ctypes.c_uint32, np.uint32),
    "fp64": (ctypes.c_double, np.float64),
}


def is_floating(value: object) -> bool:
    """Whether ``value`` is a tensor whose exponents can be counted."""
    return isinstance(value, paddle.Tensor) and value.dtype in NAMES and value._is_initialized()


def view(tensor: Any, label: str = "") -> TensorBits:
    """The bits in place where that is possible: good until ``tensor`` changes."""
    name = NAMES[tensor.dtype]
    return TensorBits(_bits(tensor, name), name, label)


def copy(tensor: Any, label: str = "") -> TensorBits:
    """The bits as they are now."""
    name = NAMES[tensor.dtype]
    return TensorBits(_bits(tensor, name).copy(), name, label)


def memory(tensor: Any) -> NDArray[np.float32] | None:
    """The memory of an fp32 tensor on a CPU, writable; None where it cannot be had."""
    if tensor.dtype != paddle.float32 or not _is_in_place(tensor):
        return None
    return _bits(tensor, "fp32").view(np.float32)


def floating_tensors(value: object) -> list[Any]:
    """All floating-point tensors in nested lists, tuples and dicts."""
    if is_floating(value):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in floating_tensors(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in floating_tensors(part)]
    return []


def _bits(tensor: Any, name: str) -> NDArray[Any]:
    element, dtype = _LAYOUTS[name]
    if not _is_in_place(tensor):
        return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(dtype)
    count = math.prod(tensor.shape)  # Tensor.size takes 5 us, this one 0.3
    if not count:
        return np.zeros(0, dtype)
    memory_ = (element * count).from_address(tensor.data_ptr())
    memory_.owner = tensor  # the array below keeps this alive, and with it the memory
    return np.frombuffer(memory_, dtype)


def _is_in_place(tensor: Any) -> bool:
    return bool(tensor.place.is_cpu_place() and tensor.is_dense() and tensor.is_contiguous())


def names_of(function: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """Every module of Paddle that holds ``function``, and under which name."""
    for key, module in list(sys.modules.items()):
        if key.split(".")[0] == "paddle" and module is not None:
            for name, value in list(vars(module).items()):
                if value is function:
                    yield module, name


def subclasses(root: type) -> Iterator[type]:
    """``root`` and all classes below it, each once."""
    seen: set[type] = set()
    pending = [root]
    while pending:
        found = pending.pop()
        if found not in seen:
            seen.add(found)
            pending += found.__subclasses__()
            yield found
