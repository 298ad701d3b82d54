"""Norms and copies of many small CPU tensors in a few calls: compiled by numba.

`torch._foreach_norm` and `torch._foreach_copy_` are loops on a CPU, which cost the same for each
tensor however small, and Python asks each tensor ten questions before its memory may be read. A
watch looks at every gradient at every step.

Each function is one call that first asks torch, through its C interface, where each tensor's memory
is and what lies there (`look` does no more), and then

- `norms`: takes 2-norms of it, in fp64. Squares of finite fp32, bf16 and fp16 numbers neither
  overflow nor vanish there, so a norm is finite exactly when its tensor is. Squares of fp64 numbers
  beyond 1e154 do overflow;
- `copy`: writes it to other places, if it is what was there before.

All keep the GIL: without it another thread might give the memory of a tensor away meanwhile.

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

# What `look` calls, each with a tensor and the place of the answer; 0 is "no error".
CALLS = (
    "device_type", "dtype", "layout", "numel", "storage_size", "storage_offset", "data_ptr", "dim",
    "sizes", "strides",
)  # fmt: skip
(
    _DEVICE, _DTYPE, _LAYOUT, _NUMEL, _BYTES, _OFFSET, _DATA, _DIM, _SIZES, _STRIDES,
) = range(len(CALLS))  # fmt: skip
# A row of `look`: what kind of numbers (an index of :data:`ITEMSIZES`), where, how many, and one
# number for sizes and strides.
ROW = ("kind", "address", "count", "shape")
_KIND, _ADDRESS, _COUNT, _SHAPE = range(len(ROW))
UNKNOWN, FAILED = -1, -2  # kinds: not dense numbers of a CPU's memory; torch raised an error
ITEMSIZES = (4, 2, 2, 8, 8)  # fp32, bf16, fp16, fp64, int64
FLOATS = 4  # the first of these have norms
_PRIME = 1_000_003

_Table = types.CPointer(types.int64)
_Norms = types.CPointer(types.float64)


# Each takes first (functions, codes, tensors, count, rows), all but the count addresses of int64:
# of :data:`CALLS`; the codes of the CPU, of the strided layout and of :data:`ITEMSIZES`; tensors of
# torch, each as the address of its C++ object; a :data:`ROW` for each, which is written, and one
# more as scratch space. Each returns -1 where torch raised an error.
_TENSORS = (_Table, _Table, _Table, types.int64, _Table)


@cache
def look() -> Callable[[int, int, int, int, int], int]:
    """Fills the rows; returns 0."""
    return _compiled(_look, *_TENSORS)


@cache
def norms() -> Callable[[int, int, int, int, int, int, int], int]:
    """With (…, most, norms): the 2-norms of tensors up to ``most`` elements; -1 of others and of
    what is not floating-point. Returns how many are -1."""
    return _compiled(_take_norms, *_TENSORS, types.int64, _Norms)


@cache
def copy() -> Callable[[int, int, int, int, int, int, int], int]:
    """With (…, known rows, targets): copies each tensor's memory to its target, and returns 1; 0,
    and copies nothing, where a row is another than was known."""
    return _compiled(_copy, *_TENSORS, _Table, _Table)


def _compiled(function: Callable[..., int], *kinds: Any) -> Any:
    signature = types.int64(*kinds)
    try:
        made = numba.cfunc(signature, cache=True)(function)
    except (RuntimeError, OSError):  # numba: "no locator available"; a full disk
        made = numba.cfunc(signature)(function)
    given = [ctypes.c_int64 if kind is types.int64 else ctypes.c_void_p for kind in kinds]
    found = ctypes.PYFUNCTYPE(ctypes.c_int64, *given)(made.address)
    found.kept = made  # the code lives as long as it can be called
    return found


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), build


@intrinsic
def _address(context: Any, array: Any) -> Any:
    """Of a C array's first element."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(array), build


@intrinsic
def _call(context: Any, function: Any, tensor: Any, answer: Any) -> Any:
    """``int32_t function(void *tensor, void *answer)``, all three given as addresses."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        anything = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.IntType(32), [anything, anything])
        pointer = builder.inttoptr(args[0], kind.as_pointer())
        given = [builder.inttoptr(argument, anything) for argument in args[1:]]
        return builder.call(pointer, given)

    return types.int32(types.int64, types.int64, types.int64), build


@intrinsic
def _as_float(context: Any, bits: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@numba.njit
def _row(calls: Any, codes: Any, tensor: int, place: int, answer: Any, row: Any) -> int:
    """Fills ``row``; returns its kind. ``place`` is the address of ``answer``."""
    kind = _kind(calls, codes, tensor, place, answer)
    if kind < 0:
        return kind
    if _call(calls[_NUMEL], tensor, place):
        return FAILED
    count = answer[0]
    if _call(calls[_DIM], tensor, place):
        return FAILED
    dim = answer[0]
    if _call(calls[_SIZES], tensor, place):
        return FAILED
    sizes = numba.carray(_pointer(answer[0]), (dim,), np.int64)
    if _call(calls[_STRIDES], tensor, place):
        return FAILED
    strides = numba.carray(_pointer(answer[0]), (dim,), np.int64)
    if not count or _reached(sizes, strides) != count:
        return UNKNOWN
    if _call(calls[_BYTES], tensor, place):
        return FAILED
    held = answer[0]
    if _call(calls[_OFFSET], tensor, place):
        return FAILED
    offset, itemsize = answer[0], ITEMSIZES[kind]
    if offset < 0 or (offset + count) * itemsize > held:
        return UNKNOWN
    if _call(calls[_DATA], tensor, place):
        return FAILED
    address = answer[0]
    if address - offset * itemsize == 0 or address == 0:  # a size, and memory nowhere
        return UNKNOWN
    row[_ADDRESS] = address
    row[_COUNT] = count
    row[_SHAPE] = dim
    for i in range(dim):
        row[_SHAPE] = (row[_SHAPE] * _PRIME + sizes[i]) * _PRIME + strides[i]
    return kind


@numba.njit
def _kind(calls: Any, codes: Any, tensor: int, place: int, answer: Any) -> int:
    """Of a tensor in this machine's memory, strided, of a dtype with an index."""
    answer[0] = 0  # of these answers torch writes 32 bits
    if _call(calls[_DEVICE], tensor, place):
        return FAILED
    if answer[0] != codes[0]:
        return UNKNOWN
    answer[0] = 0
    if _call(calls[_LAYOUT], tensor, place):
        return FAILED
    if answer[0] != codes[1]:
        return UNKNOWN
    answer[0] = 0
    if _call(calls[_DTYPE], tensor, place):
        return FAILED
    for i in range(len(ITEMSIZES)):
        if answer[0] == codes[2 + i]:
            return i
    return UNKNOWN


@numba.njit
def _reached(sizes: Any, strides: Any) -> int:
    """Elements without a gap, of the dimensions in the order of their strides."""
    reached = 1
    for _ in range(sizes.size):
        for i in range(sizes.size):
            if strides[i] == reached and sizes[i] > 1:
                reached *= sizes[i]
                break
    return reached


@numba.njit
def _fill(calls: Any, codes: Any, tensors: Any, count: int, rows: Any) -> int:
    functions = numba.carray(calls, (len(CALLS),))
    known = numba.carray(codes, (2 + len(ITEMSIZES),))
    table = numba.carray(rows, (count + 1, len(ROW)))  # the last row is for answers
    answer = table[count]
    place = _address(rows) + count * len(ROW) * 8
    first = _address(tensors)
    failed = 0
    for i in range(count):
        row = table[i]
        # The address of an address is what C++ has as a tensor, and C as its handle.
        row[_KIND] = _row(functions, known, first + 8 * i, place, answer, row)
        failed += row[_KIND] == FAILED
    return failed


def _look(calls: Any, codes: Any, tensors: Any, count: int, rows: Any) -> int:
    return -1 if _fill(calls, codes, tensors, count, rows) else 0


@numba.njit(fastmath={"reassoc", "contract"})  # so that the sum fills its vectors
def _sum_of_squares(values: Any) -> float:
    total = 0.0
    for i in range(values.size):
        wide = np.float64(values[i])
        total += wide * wide
    return total


@numba.njit(fastmath={"reassoc", "contract"})
def _sum_of_bf16(bits: Any) -> float:
    total = 0.0
    for i in range(bits.size):
        wide = np.float64(_as_float(np.uint32(np.uint32(bits[i]) << np.uint32(16))))
        total += wide * wide
    return total


@numba.njit(fastmath={"reassoc", "contract"})
def _sum_of_fp16(bits: Any) -> float:
    """The bits of a magnitude, moved to fp32's places, are the number times 2^-112."""
    total = 0.0
    for i in range(bits.size):
        magnitude = np.uint32(bits[i]) & np.uint32(0x7FFF)
        moved = np.uint32(magnitude << np.uint32(13))
        if magnitude >= np.uint32(0x7C00):
            moved = np.uint32(moved | np.uint32(0x7F800000))
        wide = np.float64(_as_float(moved)) * 2.0**112
        total += wide * wide
    return total


def _take_norms(
    calls: Any, codes: Any, tensors: Any, count: int, rows: Any, most: int, found: Any
) -> int:
    if _fill(calls, codes, tensors, count, rows):
        return -1
    table = numba.carray(rows, (count, len(ROW)))
    out = numba.carray(found, (count,))
    unknown = 0
    for i in range(count):
        kind, size = table[i, _KIND], table[i, _COUNT]
        total = -1.0
        if 0 <= kind < FLOATS and size <= most:
            memory = _pointer(table[i, _ADDRESS])
            if kind == 0:
                total = _sum_of_squares(numba.carray(memory, (size,), np.float32))
            elif kind == 1:
                total = _sum_of_bf16(numba.carray(memory, (size,), np.uint16))
            elif kind == 2:
                total = _sum_of_fp16(numba.carray(memory, (size,), np.uint16))
            else:
                total = _sum_of_squares(numba.carray(memory, (size,), np.float64))
        unknown += total == -1.0
        out[i] = total if total == -1.0 else np.sqrt(total)
    return unknown


def _copy(
    calls: Any, codes: Any, tensors: Any, count: int, rows: Any, known: Any, targets: Any
) -> int:
    if _fill(calls, codes, tensors, count, rows):
        return -1
    table = numba.carray(rows, (count, len(ROW)))
    before = numba.carray(known, (count, len(ROW)))
    for i in range(count):
        for j in range(len(ROW)):
            if table[i, j] != before[i, j]:
                return 0
    places = numba.carray(targets, (count,))
    for i in range(count):
        size = table[i, _COUNT]
        source = _pointer(table[i, _ADDRESS])
        target = _pointer(places[i])
        itemsize = ITEMSIZES[table[i, _KIND]]
        if itemsize == 8:
            numba.carray(target, (size,), np.int64)[:] = numba.carray(source, (size,), np.int64)
        elif itemsize == 4:
            numba.carray(target, (size,), np.int32)[:] = numba.carray(source, (size,), np.int32)
        else:
            numba.carray(target, (size,), np.int16)[:] = numba.carray(source, (size,), np.int16)
    return 1
