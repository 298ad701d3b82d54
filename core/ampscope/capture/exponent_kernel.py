"""The compiled part of the CPU counter: raw bits in, raw rows out (numba, without the GIL).

A core increments at most one counter a cycle, so the fewer increments the better. Elements are
taken in chunks that stay in the L1 cache, and a vectorised look at a chunk picks one of three ways:

- *Pairs*, the usual one: every element is +0 or has one of 63 neighbouring exponents (for bf16 and
  fp32 2^-45 … 2^17; for fp16 all normal numbers). Two exponents make one key of 12 bits, so that
  one increment counts two elements.
- *Fields*: normal numbers with other exponents, and -0. Sign-and-exponent fields are counted as
  they stand.
- *Ranks*: subnormals, infinities or NaNs. A vectorised pass first turns magnitudes into ranks, one
  per power of two: 0 for zero, 1 … m for the subnormals of a format with m mantissa bits, m + e for
  the exponent field e.

Counting goes to some tables in turn: a counter that was incremented just before comes back from
the store buffer only after 4 to 7 cycles (Agner Fog, Microarchitecture, "store forwarding"). Equal
pairs follow each other less often than equal fields, so two tables do where the others need four.

Any number of threads may run `_work` on one job: each takes the next piece by an atomic addition,
and adds to a row of its own. All compiled code is in this file: numba's cache notices its change.
"""

# numba compiles these functions from their source, with C's integers: Python's types do not apply.
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ampscope.numerics.histogram import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, RAW_LEN

CHUNK = 8192  # elements: 16 to 32 KiB of bits, which an L1 data cache holds
PIECE = 8 * CHUNK  # elements a thread takes at a time; with single chunks prefetching suffers
TABLES = 4
FIELDS = 512  # sign and exponent of the widest formats, bf16 and fp32: 9 bits
RANKS = 23 + 256  # fp32: 23 powers of two of subnormals, 256 exponent fields
WINDOW = 64  # exponents in half a key: +0 and 63 exponent fields
BELOW_ONE = 46  # the window's first exponent is -45, so that small gradients lie in it
FEW = 1 << 15  # elements: below, emptying and reading a table of pairs costs more than it saves

# A job is a C structure of 64-bit integers: one tensor to count, and who has got how far with it.
# ``bits`` and ``rows`` are addresses; there are as many rows as threads may come.
JOB = ("next_element", "next_row", "bits", "size", "bytes_each", "mantissa", "rank_offset",
       "multiplicity", "rows", "threads")  # fmt: skip
_NEXT_ELEMENT, _NEXT_ROW, _BITS, _SIZE, _BYTES = range(5)
_MANTISSA, _OFFSET, _TIMES, _ROWS, _THREADS = range(5, 10)


class CompiledKernel(Protocol):
    """What numba gives back of a compiled C callback."""

    address: int  # of a C function, void (int64_t *job)


def compile_kernel() -> CompiledKernel:
    """The kernel, ready to be called with the address of a job.

    Machine code is kept in numba's cache: beside this file, or in the user's cache folder where
    the package is read-only. Where neither can be written it is compiled anew (about 3 s).
    """
    signature = types.void(types.CPointer(types.int64))
    try:
        return numba.cfunc(signature, cache=True)(_work)
    except (RuntimeError, OSError):  # numba: "no locator available"; a full disk
        return numba.cfunc(signature)(_work)


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    return numba.njit(nogil=True)(function)  # it lands in the kernel's own cache entry


def _inline(function: Callable[..., Any]) -> Callable[..., Any]:
    return numba.njit(nogil=True, inline="always")(function)  # for its constants' sake


@intrinsic
def _fetch_add(context: Any, job: Any, index: Any, amount: Any) -> Any:
    """``job[index] += amount`` in one atomic step; gives the value before."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("add", place, args[2], "seq_cst")

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), build


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), build


@_inner
def _has_outside(bits: Any, magnitude: int, kept: int, lowest: int, end: int) -> bool:
    """Whether anything but zeros and magnitudes in [``lowest``, ``end``) is among ``bits`` (0.03 ns
    an element). Zero is what has none of the ``kept`` bits, so that -0 may count or not."""
    found = False
    for i in range(bits.size):
        m = bits[i] & magnitude
        found |= (m >= end) | ((m < lowest) & ((bits[i] & kept) != 0))
    return found


@_inline
def _pack_as(bits: Any, keys: Any, unit: Any, mantissa: int, base: int) -> None:
    """Keys of pairs, with constants for a format and in the width of ``bits``: the loop then fills
    its vectors. An element's partner lies half a chunk away, which needs no shuffling."""
    magnitude, first, six = unit((1 << (8 * bits.itemsize - 1)) - 1), unit(base), unit(6)
    for i in range(keys.size):
        one = unit(unit(bits[i] & magnitude) >> unit(mantissa))
        other = unit(unit(bits[keys.size + i] & magnitude) >> unit(mantissa))
        one, other = unit(max(one, first) - first), unit(max(other, first) - first)
        keys[i] = np.uint16(unit(one | unit(other << six)))


@_inner
def _pack(bits: Any, keys: Any, unit: Any, mantissa: int) -> None:
    """Keys of pairs (0.03 ns an element of 16 bits, 0.06 of 32)."""
    if mantissa == 7:  # bf16
        _pack_as(bits, keys, unit, 7, 127 - BELOW_ONE)
    elif mantissa == 10:  # fp16
        _pack_as(bits, keys, unit, 10, 0)
    else:  # fp32
        _pack_as(bits, keys, unit, 23, 127 - BELOW_ONE)


@_inner
def _count_pairs(keys: Any, pairs: Any) -> None:
    """One count for each pair, to two tables in turn (0.2 ns an element)."""
    a, b = pairs[0], pairs[1]
    one = np.uint32(1)
    whole = keys.size - keys.size % 2
    for i in range(0, whole, 2):
        a[keys[i]] += one
        b[keys[i + 1]] += one
    for i in range(whole, keys.size):
        a[keys[i]] += one


@_inner
def _unpair(pairs: Any, base: int, fields: Any) -> None:
    """Add what ``pairs`` counted to the fields; the place in a pair does not matter."""
    for key in range(pairs.shape[1]):
        count = np.int64(pairs[0, key]) + np.int64(pairs[1, key])
        for place in (key % WINDOW, key // WINDOW):
            fields[base + place if place else 0] += count


@_inner
def _rank(bits: Any, magnitude: int, smallest: int, mantissa: int, ranks: Any) -> None:
    """Ranks of ``bits``. An integer below 2^24 is exact in fp32, so the exponent of the converted
    mantissa is the position of its highest bit; no instruction touches a subnormal float."""
    for i in range(bits.size):
        m = np.int32(bits[i] & magnitude)
        exponent = np.float32(m).view(np.int32) >> np.int32(23)
        highest = max(exponent - np.int32(126), np.int32(0))
        ranks[i] = np.uint16((m >> mantissa) + mantissa if m >= smallest else highest)


@_inner
def _tally(keys: Any, shift: int, tables: Any) -> None:
    """One count for each ``key >> shift``, to the four tables in turn (0.3 ns an element)."""
    a, b, c, d = tables[0], tables[1], tables[2], tables[3]
    one = np.uint32(1)
    whole = keys.size - keys.size % TABLES
    for i in range(0, whole, TABLES):
        a[keys[i] >> shift] += one
        b[keys[i + 1] >> shift] += one
        c[keys[i + 2] >> shift] += one
        d[keys[i + 3] >> shift] += one
    for i in range(whole, keys.size):
        a[keys[i] >> shift] += one


@_inner
def _occurrences(bits: Any, pattern: int) -> int:
    """How often one bit pattern occurs (0.05 ns an element)."""
    count = 0
    for i in range(bits.size):
        count += bits[i] == pattern
    return count


@_inner
def _sum(tables: Any, key: int) -> int:
    """Counts are 32 bits wide and their sum is 64."""
    total = np.int64(0)
    for i in range(TABLES):
        total += tables[i, key]
    return total


@_inner
def _fold(fields: Any, ranks: Any, width: int, mantissa: int, rank_offset: int,
          row: Any, multiplicity: int) -> None:  # fmt: skip
    """Add the counts of finite non-zero numbers to the raw row. ``width`` is the number of exponent
    fields: ``fields[width + e]`` holds the negative numbers of the field e."""
    for rank in range(1, mantissa + width - 1):
        count = _sum(ranks, rank)
        if rank > mantissa:
            count += fields[rank - mantissa] + fields[rank - mantissa + width]
        row[rank + rank_offset] += count * multiplicity


@_inner
def _count(job: Any, unit: Any, row: Any) -> None:
    """Count pieces of the job into ``row`` while there are any. 2^33 elements fit in the tables."""
    info = numba.carray(job, _THREADS + 1, np.int64)
    size, bytes_each, mantissa, times = info[_SIZE], info[_BYTES], info[_MANTISSA], info[_TIMES]
    above = 8 * bytes_each - 1  # the sign's position
    width = 1 << (above - mantissa)
    sign, magnitude = unit(1 << above), unit((1 << above) - 1)
    everything = unit(sign | magnitude)
    smallest, infinity = unit(1 << mantissa), unit((width - 1) << mantissa)
    base = max((width >> 1) - 1 - BELOW_ONE, 0)
    lowest = unit((base + 1) << mantissa)
    end = unit(min((base + WINDOW) << mantissa, (width - 1) << mantissa))
    tables = np.zeros((TABLES, FIELDS), np.uint32)
    ranks = np.zeros((TABLES, RANKS), np.uint32)
    pairs = np.zeros((2, WINDOW * WINDOW if size >= FEW else 0), np.uint32)
    negative_zeros = nonfinite = positive = negative = 0
    buffer = np.empty(min(CHUNK, size), np.uint16)
    piece = _fetch_add(job, _NEXT_ELEMENT, PIECE)
    while piece < size:
        is_usual = True  # where one chunk needs ranks, the rest of its piece is not looked at first
        for start in range(piece, min(piece + PIECE, size), CHUNK):
            length = min(CHUNK, size - start)
            chunk = numba.carray(_pointer(info[_BITS] + start * bytes_each), length, unit)
            if (
                is_usual
                and pairs.size
                and not _has_outside(chunk, magnitude, everything, lowest, end)
            ):
                half = length // 2
                _pack(chunk, buffer[:half], unit, mantissa)
                _count_pairs(buffer[:half], pairs)
                _tally(chunk[2 * half :], np.uint64(mantissa), tables)
            elif is_usual and not _has_outside(chunk, magnitude, magnitude, smallest, infinity):
                _tally(chunk, np.uint64(mantissa), tables)
            else:
                is_usual = False
                _rank(chunk, magnitude, np.int32(smallest), np.int32(mantissa), buffer)
                _tally(buffer[:length], np.uint64(0), ranks)
                negative_zeros += _occurrences(chunk, sign)
                if _sum(ranks, mantissa + width - 1) > nonfinite:
                    nonfinite = _sum(ranks, mantissa + width - 1)
                    positive += _occurrences(chunk, infinity)
                    negative += _occurrences(chunk, sign | infinity)
        piece = _fetch_add(job, _NEXT_ELEMENT, PIECE)
    fields = np.zeros(FIELDS, np.int64)
    for field in range(2 * width):
        fields[field] = _sum(tables, field)
    _unpair(pairs, base, fields)
    _fold(fields, ranks, width, mantissa, info[_OFFSET], row, times)
    row[POS_ZERO] += (fields[0] + _sum(ranks, 0) - negative_zeros) * times
    row[NEG_ZERO] += (fields[width] + negative_zeros) * times
    row[NAN] += (nonfinite - positive - negative) * times
    row[POS_INF] += positive * times
    row[NEG_INF] += negative * times


def _work(job: Any) -> None:
    info = numba.carray(job, _THREADS + 1, np.int64)
    index = _fetch_add(job, _NEXT_ROW, 1)
    if index < info[_THREADS]:
        place = info[_ROWS] + index * RAW_LEN * 8
        row = numba.carray(_pointer(place), RAW_LEN, np.int64)
        if info[_BYTES] == 2:
            _count(job, np.uint16, row)
        else:
            _count(job, np.uint32, row)
