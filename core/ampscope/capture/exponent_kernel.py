"""The compiled part of the CPU counter: raw bits in, a raw row out (numba, no GIL).

Elements are taken in chunks that stay in the L1 cache. A vectorised look tells whether a chunk
holds subnormals, infinities or NaNs. If not (nearly always), its sign-and-exponent fields are
counted as they stand. If so, a vectorised pass first turns magnitudes into *ranks*, one per power
of two: 0 for zero, 1 … m for the subnormals of a format with m mantissa bits, m + e for the
exponent field e.

Counting goes to four tables in turn: a counter that was incremented just before is still on its
way from the store buffer, 4 to 7 cycles (Agner Fog, Microarchitecture, "store forwarding"), so
that a tensor of equal values would take several times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from ampscope.exponents import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, RAW_LEN

CHUNK = 8192  # elements: 16 to 32 KiB of bits, which an L1 data cache holds
TABLES = 4
FIELDS = 512  # sign and exponent of the widest formats, bf16 and fp32: 9 bits
RANKS = 23 + 256  # fp32: 23 powers of two of subnormals, 256 exponent fields

Bits = NDArray[np.uint16] | NDArray[np.uint32]
Tables = NDArray[np.uint32]
Kernel = Callable[[Bits, int, int, NDArray[np.int64], int], None]


def compile_kernel() -> Kernel:
    """``count(bits, mantissa, rank_offset, row, multiplicity)``, ready to run.

    Machine code is kept in numba's cache: beside this file, or in the user's cache folder where
    the package is read-only. Where neither can be written it is compiled anew (about 2 s).
    """
    try:
        return _built(cached=True)
    except (RuntimeError, OSError):  # numba: "no locator available"; a full disk
        return _built(cached=False)


def _built(cached: bool) -> Kernel:
    kernel: Kernel = numba.njit(nogil=True, cache=cached)(_count)
    row = np.zeros(RAW_LEN, np.int64)
    kernel(np.zeros(1, np.uint16), 10, 125, row, 1)  # compiles, and meets a disk that is full
    kernel(np.zeros(1, np.uint32), 23, 0, row, 1)
    return kernel


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of the kernel; it lands in the kernel's own cache entry."""
    compiled: Callable[..., Any] = numba.njit(nogil=True)(function)
    return compiled


@_inner
def _is_unusual(bits: Bits, magnitude: int, smallest: int, infinity: int) -> bool:
    """Whether a subnormal, an infinity or a NaN is among ``bits`` (0.04 ns an element)."""
    found = False
    for i in range(bits.size):
        m = bits[i] & magnitude
        found |= (m >= infinity) | ((m < smallest) & (m != 0))
    return found


@_inner
def _rank(bits: Bits, magnitude: int, smallest: int, mantissa: int, ranks: Any) -> None:
    """Ranks of ``bits``. An integer below 2^24 is exact in fp32, so the exponent of the converted
    mantissa is the position of its highest bit; no instruction touches a subnormal float."""
    for i in range(bits.size):
        m = np.int32(bits[i] & magnitude)
        exponent = np.float32(m).view(np.int32) >> np.int32(23)  # type: ignore[attr-defined]  # numba's view of a scalar
        highest = max(exponent - np.int32(126), np.int32(0))
        ranks[i] = np.uint16((m >> mantissa) + mantissa if m >= smallest else highest)


@_inner
def _tally(keys: Any, shift: int, tables: Tables) -> None:
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
def _occurrences(bits: Bits, pattern: int) -> int:
    """How often one bit pattern occurs (0.05 ns an element)."""
    count = 0
    for i in range(bits.size):
        count += bits[i] == pattern
    return count


@_inner
def _sum(tables: Tables, key: int) -> int:
    """Counts are 32 bits wide and their sum is 64."""
    total = np.int64(0)
    for i in range(TABLES):
        total += tables[i, key]
    return total


@_inner
def _fold(
    fields: Tables, ranks: Tables, width: int, mantissa: int, rank_offset: int,
    row: NDArray[np.int64], multiplicity: int,
) -> None:  # fmt: skip
    """Add the counts of finite non-zero numbers to the raw row. ``width`` is the number of exponent
    fields: ``fields[width + e]`` holds the negative numbers of the field e."""
    for rank in range(1, mantissa + width - 1):
        count = _sum(ranks, rank)
        if rank > mantissa:
            count += _sum(fields, rank - mantissa) + _sum(fields, rank - mantissa + width)
        row[rank + rank_offset] += count * multiplicity


def _count(
    bits: Bits, mantissa: int, rank_offset: int, row: NDArray[np.int64], multiplicity: int
) -> None:
    """Add the counts of ``bits`` (fewer than 2^32 elements) to ``row``."""
    unit: Any = bits.dtype.type
    above = 8 * bits.itemsize - 1  # the sign's position
    width = 1 << (above - mantissa)
    sign, magnitude = unit(1 << above), unit((1 << above) - 1)
    smallest, infinity = unit(1 << mantissa), unit((width - 1) << mantissa)
    fields = np.zeros((TABLES, FIELDS), np.uint32)
    ranks = np.zeros((TABLES, RANKS), np.uint32)
    negative_zeros = nonfinite = positive = negative = 0
    buffer = np.empty(min(CHUNK, bits.size), np.uint16)
    for start in range(0, bits.size, CHUNK):
        chunk = bits[start : start + CHUNK]
        if _is_unusual(chunk, magnitude, smallest, infinity):
            _rank(chunk, magnitude, np.int32(smallest), np.int32(mantissa), buffer)
            _tally(buffer[: chunk.size], np.uint64(0), ranks)
            negative_zeros += _occurrences(chunk, sign)
            if _sum(ranks, mantissa + width - 1) > nonfinite:
                nonfinite = _sum(ranks, mantissa + width - 1)
                positive += _occurrences(chunk, infinity)
                negative += _occurrences(chunk, sign | infinity)
        else:
            _tally(chunk, np.uint64(mantissa), fields)
    _fold(fields, ranks, width, mantissa, rank_offset, row, multiplicity)
    row[POS_ZERO] += (_sum(fields, 0) + _sum(ranks, 0) - negative_zeros) * multiplicity
    row[NEG_ZERO] += (_sum(fields, width) + negative_zeros) * multiplicity
    row[NAN] += (nonfinite - positive - negative) * multiplicity
    row[POS_INF] += positive * multiplicity
    row[NEG_INF] += negative * multiplicity
