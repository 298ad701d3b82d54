"""2-norms of many small fp32 tensors in one call: compiled by numba, in fp64, without the GIL.

`torch._foreach_norm` on a CPU is a loop of reductions, 4 us for each tensor however small. A watch
takes the norm of every gradient at every step; in a model of many small layers that was 1.5 % of a
step. One call here reads a table of addresses and sizes instead. Squares of finite fp32 numbers
neither overflow nor vanish in fp64, so a norm is finite exactly when its tensor is.

All compiled code is in this file: numba's cache notices its change.
"""

# numba compiles these functions from their source, with C's integers: Python's types do not apply.
# mypy: ignore-errors

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.CPointer(types.float64))


def norms_at(places: list[tuple[int, int]]) -> NDArray[np.float64]:
    """The 2-norms of contiguous fp32 tensors in this machine's memory, each given as its address
    and its number of elements."""
    table = np.array(places, np.int64).reshape(-1, 2)
    found = np.empty(len(table))
    _kernel()(table.ctypes.data, len(table), found.ctypes.data)
    return found


@cache
def _kernel() -> Callable[[int, int, int], None]:
    try:
        compiled = numba.cfunc(_SIGNATURE, cache=True)(_norms)
    except (RuntimeError, OSError):  # numba: "no locator available"; a full disk
        compiled = numba.cfunc(_SIGNATURE)(_norms)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    function = call(compiled.address)
    function.kept = compiled  # the code lives as long as it can be called
    return function


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), build


@numba.njit(nogil=True, fastmath={"reassoc", "contract"})  # so that the sum fills its vectors
def _sum_of_squares(values: Any) -> float:
    total = 0.0
    for i in range(values.size):
        wide = np.float64(values[i])
        total += wide * wide
    return total


def _norms(table: Any, count: int, found: Any) -> None:
    places = numba.carray(table, (count, 2))
    norms = numba.carray(found, (count,))
    for i in range(count):
        values = numba.carray(_pointer(places[i, 0]), (places[i, 1],), np.float32)
        norms[i] = np.sqrt(_sum_of_squares(values))
