"""The compiled part of the CPU counter: raw bits in, raw rows out (numba, without the GIL).

Elements are taken in chunks that stay in the L1 cache. A vectorised look tells whether a chunk
holds subnormals, infinities or NaNs. If not (nearly always), its sign-and-exponent fields are
counted as they stand. If so, a vectorised pass first turns magnitudes into *ranks*, one per power
of two: 0 for zero, 1 … m for the subnormals of a format with m mantissa bits, m + e for the
exponent field e.

Counting goes to four tables in turn: a counter that was incremented just before comes back from the
store buffer only after 4 to 7 cycles (Agner Fog, Microarchitecture, "store forwarding").

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

from ampscope.exponents import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, RAW_LEN

CHUNK = 8192  # elements: 16 to 32 KiB of bits, which an L1 data cache holds
PIECE = 8 * CHUNK  # elements a thread takes at a time; with single chunks prefetching suffers
TABLES = 4
FIELDS = 512  # sign and exponent of the widest formats, bf16 and fp32: 9 bits
RANKS = 23 + 256  # fp32: 23 powers of two of subnormals, 256 exponent fields

# A job is a C structure of 64-bit integers: one tensor to count, and who has got how far with it.
# ``bits`` and ``rows`` are addresses; there are as many rows as threads may come.
JOB = ("next_element", "next_row", "bits", "size", "bytes_each", "mantissa", "rank_offset",
       "multiplicity", "rows", "threads")  # fmt: skip
_NEXT_ELEMENT, _NEXT_ROW, _BITS, _SIZE, _BYTES = range(5)
_MANTISSA, _OFFSET, _TIMES, _ROWS, _THREADS = range(5, 10)


class Kernel(Protocol):
    address: int  # of a C function, void (int64_t *job)


def compile_kernel() -> Kernel:
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
def _is_unusual(bits: Any, magnitude: int, smallest: int, infinity: int) -> bool:
    """Whether a subnormal, an infinity or a NaN is among ``bits`` (0.04 ns an element)."""
    found = False
    for i in range(bits.size):
        m = bits[i] & magnitude
        found |= (m >= infinity) | ((m < smallest) & (m != 0))
    return found


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
            count += _sum(fields, rank - mantissa) + _sum(fields, rank - mantissa + width)
        row[rank + rank_offset] += count * multiplicity


@_inner
def _count(job: Any, unit: Any, row: Any) -> None:
    """Count pieces of the job into ``row`` while there are any. 2^34 elements fit in the tables."""
    info = numba.carray(job, _THREADS + 1, np.int64)
    size, bytes_each, mantissa, times = info[_SIZE], info[_BYTES], info[_MANTISSA], info[_TIMES]
    above = 8 * bytes_each - 1  # the sign's position
    width = 1 << (above - mantissa)
    sign, magnitude = unit(1 << above), unit((1 << above) - 1)
    smallest, infinity = unit(1 << mantissa), unit((width - 1) << mantissa)
    fields = np.zeros((TABLES, FIELDS), np.uint32)
    ranks = np.zeros((TABLES, RANKS), np.uint32)
    negative_zeros = nonfinite = positive = negative = 0
    buffer = np.empty(min(CHUNK, size), np.uint16)
    piece = _fetch_add(job, _NEXT_ELEMENT, PIECE)
    while piece < size:
        for start in range(piece, min(piece + PIECE, size), CHUNK):
            length = min(CHUNK, size - start)
            chunk = numba.carray(_pointer(info[_BITS] + start * bytes_each), length, unit)
            if _is_unusual(chunk, magnitude, smallest, infinity):
                _rank(chunk, magnitude, np.int32(smallest), np.int32(mantissa), buffer)
                _tally(buffer[:length], np.uint64(0), ranks)
                negative_zeros += _occurrences(chunk, sign)
                if _sum(ranks, mantissa + width - 1) > nonfinite:
                    nonfinite = _sum(ranks, mantissa + width - 1)
                    positive += _occurrences(chunk, infinity)
                    negative += _occurrences(chunk, sign | infinity)
            else:
                _tally(chunk, np.uint64(mantissa), fields)
        piece = _fetch_add(job, _NEXT_ELEMENT, PIECE)
    _fold(fields, ranks, width, mantissa, info[_OFFSET], row, times)
    row[POS_ZERO] += (_sum(fields, 0) + _sum(ranks, 0) - negative_zeros) * times
    row[NEG_ZERO] += (_sum(fields, width) + negative_zeros) * times
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
