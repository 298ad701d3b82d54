"""The exponent histogram on CUDA: one Triton launch over many tensors of any mix of formats.

The host sends a table with one line per *segment*, a run of at most SEGMENT elements of one tensor;
each program counts one segment and adds to the row that its line names::

    address  count  row  width  mantissa  rank_offset  infinity  largest  multiplicity

`tl.histogram` costs one ballot per index bit and one population count per 32 bins and element, so
that 512 bins would be bound by arithmetic. A tile is therefore counted in 64 bins that end at its
largest exponent, with both zeros; what lies outside (values 2^60 times smaller than the largest,
infinities, NaNs) is counted in a second pass that ordinary tiles do not need.
"""

# Triton's functions are compiled from their source and have no types that Python knows.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.exponent_layout import LAYOUTS
from ampscope.exponents import NAN, NEG_ZERO, POS_INF, POS_ZERO, RAW_LEN

TILE = 4096  # elements counted at once: 32 a thread with 4 warps
SEGMENT = 4 * TILE  # elements a program: a tensor of 2^20 gives 64 programs, about half of an A100
COLUMNS = 9

_WINDOW = tl.constexpr(64)
_EXPONENTS = tl.constexpr(60)  # bins of the window that are powers of two
_REST = tl.constexpr(62)  # bin of the window for what needs the second pass
_NOTHING = tl.constexpr(63)  # bin of the window for lanes past the segment's end
_ALL = tl.constexpr(512)
_ROW = tl.constexpr(RAW_LEN)
_POS_ZERO, _NEG_ZERO = tl.constexpr(POS_ZERO), tl.constexpr(NEG_ZERO)
_NAN, _POS_INF = tl.constexpr(NAN), tl.constexpr(POS_INF)


class Entry(NamedTuple):
    """A flat, contiguous tensor of a dtype in ``LAYOUTS`` and the row it counts for."""

    flat: Tensor
    row: int
    multiplicity: int


@triton.jit
def _load(address, place, inside, width):
    """Bits of a tile, whatever the width. A whole, aligned tile loads 16 bytes a thread."""
    if width == 16:
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + place, mask=inside).to(tl.int32)
    elif width == 32:
        bits = tl.load(address.to(tl.pointer_type(tl.int32)) + place, mask=inside)
    else:
        bits = tl.load(address.to(tl.pointer_type(tl.int8)) + place, mask=inside).to(tl.int32)
    return bits


@triton.jit
def _bins(bits, width, mantissa, rank_offset, infinity, largest):
    """Row index of each element, and whether it is finite and not zero."""
    magnitude = bits & (((1 << (width - 1)) - 1).to(tl.int32))
    negative = (bits < 0).to(tl.int32)  # narrow formats were sign-extended
    # An integer below 2^24 is exact in fp32: its exponent is the position of its highest bit.
    highest = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    field = magnitude >> mantissa
    bins = tl.where(field > 0, field + mantissa, highest) + rank_offset
    bins = tl.where(magnitude == 0, _POS_ZERO + negative, bins)
    bins = tl.where(magnitude == infinity, _POS_INF + negative, bins)
    bins = tl.where(magnitude > largest, _NAN, bins)
    return bins, bins < _POS_ZERO


@triton.jit
def _add(row, bins, counts, keep, times):
    tl.atomic_add(row + bins, counts.to(tl.int64) * times, mask=keep & (counts > 0), sem="relaxed")


@triton.jit
def _count_tile(bits, inside, row, width, mantissa, rank_offset, infinity, largest, times):
    bins, regular = _bins(bits, width, mantissa, rank_offset, infinity, largest)
    first = tl.max(tl.where(regular & inside, bins, 0), 0) - (_EXPONENTS - 1)
    local = tl.where(regular & (bins >= first), bins - first, _REST)
    local = tl.where(bins == _POS_ZERO, _EXPONENTS, local)
    local = tl.where(bins == _NEG_ZERO, _EXPONENTS + 1, local)
    local = tl.where(inside, local, _NOTHING)
    found = tl.histogram(local, _WINDOW)
    window = tl.arange(0, _WINDOW)
    zeros = window - _EXPONENTS + _POS_ZERO
    _add(row, tl.where(window < _EXPONENTS, window + first, zeros), found, window < _REST, times)
    if tl.sum(tl.where(window == _REST, found, 0), 0) > 0:
        everything = tl.arange(0, _ALL)
        rest = tl.histogram(tl.where(local == _REST, bins, _ALL - 1), _ALL)
        _add(row, everything, rest, everything < _ROW, times)


@triton.jit
def _count_segments(table, counts, columns: tl.constexpr, tile: tl.constexpr, end: tl.constexpr):
    line = table + tl.program_id(0) * columns
    address = tl.load(line)
    count = tl.load(line + 1).to(tl.int32)
    row = counts + tl.load(line + 2) * _ROW
    width = tl.load(line + 3).to(tl.int32)
    mantissa = tl.load(line + 4).to(tl.int32)
    rank_offset = tl.load(line + 5).to(tl.int32)
    infinity = tl.load(line + 6).to(tl.int32)
    largest = tl.load(line + 7).to(tl.int32)
    times = tl.load(line + 8)
    for start in range(0, end, tile):
        if start < count:
            place = start + tl.arange(0, tile)
            inside = place < count
            if (start + tile <= count) & (address % 16 == 0):
                bits = _load(tl.multiple_of(address, 16), place, None, width)
            else:
                bits = _load(address, place, inside, width)
            _count_tile(bits, inside, row, width, mantissa, rank_offset, infinity, largest, times)


def launch(entries: Sequence[Entry], counts: Tensor) -> None:
    """Count all ``entries`` into ``counts`` [rows, RAW_LEN], in order with the current stream.

    Returns at once. The memory of a tensor may be given up after the call, for reuse on the same
    stream.
    """
    lines = segment_table(entries)
    table = torch.from_numpy(lines)
    if counts.is_cuda:
        table = table.pin_memory().to(counts.device, non_blocking=True)
        with torch.cuda.device(counts.device):
            _count_segments[(len(lines),)](table, counts, COLUMNS, TILE, SEGMENT, num_warps=4)
    else:  # Triton's interpreter
        _count_segments[(len(lines),)](table, counts, COLUMNS, TILE, SEGMENT)


def segment_table(entries: Sequence[Entry]) -> NDArray[np.int64]:
    """One line per segment, [segments, COLUMNS]."""
    lines = np.array([_line(entry) for entry in entries], np.int64)
    segments = -(-lines[:, 1] // SEGMENT)
    first = np.repeat(np.cumsum(segments) - segments, segments)
    table = np.repeat(lines, segments, axis=0)
    done = (np.arange(len(table)) - first) * SEGMENT
    table[:, 0] += done * (table[:, 3] // 8)
    table[:, 1] = np.minimum(table[:, 1] - done, SEGMENT)
    return table


def _line(entry: Entry) -> tuple[int, ...]:
    flat, bits = entry.flat, LAYOUTS[entry.flat.dtype]
    return (
        flat.data_ptr(), flat.numel(), entry.row, bits.width, bits.mantissa, bits.rank_offset,
        bits.infinity, bits.largest, entry.multiplicity,
    )  # fmt: skip


@cache
def is_usable(device: torch.device) -> bool:
    """Whether a launch works on ``device``: Triton needs compute capability 7.0 and a C compiler,
    and raises errors of many kinds without them."""
    try:
        counts = torch.zeros(1, RAW_LEN, dtype=torch.int64, device=device)
        launch([Entry(torch.zeros(1, device=device), 0, 1)], counts)
    except Exception:
        return False
    return int(counts[0, POS_ZERO]) == 1
