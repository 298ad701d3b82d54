"""The exponent histogram on CUDA: one Triton launch over many tensors of any mix of formats.

The host sends a table with one line per *segment*, a run of at most SEGMENT elements of one tensor;
each program counts one segment and adds to the row that its line names::

    address  count  row  width  mantissa  rank_offset  infinity  largest  multiplicity

`tl.histogram` of Triton 3.6 costs a ballot per bit of the index and a population count per 32 bins
for each element, so that 512 bins would be bound by arithmetic, not by memory. A tile is therefore
counted in 32 bins: both zeros, and 29 powers of two up to its largest. What lies outside (values
2^29 times smaller, subnormals) takes a second pass that ordinary tiles do not need; a tile with an
infinity or a NaN, and the end of a tensor, take that pass alone.
"""

# Triton's functions are compiled from their source and have no types that Python knows.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import warnings
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
from ampscope.numerics.histogram import NAN, POS_INF, POS_ZERO, RAW_LEN

TILE = 4096  # elements counted at once: 32 a thread with 4 warps
SEGMENT = 4 * TILE  # elements a program: a tensor of 2^20 gives 64 programs, about half of an A100
COLUMNS = 9

_WINDOW = tl.constexpr(32)
_EXPONENTS = tl.constexpr(29)  # bins 0 … 28: exponent fields; bins 29 and 30: +0 and -0
_REST = tl.constexpr(31)  # everything else
_ALL = tl.constexpr(512)  # bins of a whole row, which `tl.histogram` wants as a power of two
_ROW = tl.constexpr(RAW_LEN)
_POS_ZERO, _POS_INF, _NAN = tl.constexpr(POS_ZERO), tl.constexpr(POS_INF), tl.constexpr(NAN)


class Entry(NamedTuple):
    """A flat, contiguous tensor of a dtype in ``LAYOUTS`` and the row it counts for."""

    flat: Tensor
    row: int
    multiplicity: int


@triton.jit
def _pointers(address, place, kind: tl.constexpr, align: tl.constexpr):
    """Addresses of a tile. Aligned to 16 bytes, the compiler gives 8 neighbours to each thread:
    one access in the 16-bit formats, two in fp32."""
    pointers = address.to(tl.pointer_type(kind)) + place
    return tl.max_contiguous(tl.multiple_of(pointers, align), (align + 1) // 2)


@triton.jit
def _load(address, place, inside, width, align: tl.constexpr):
    """Bits of a tile, sign-extended to 32."""
    if width == 16:
        bits = tl.load(_pointers(address, place, tl.int16, align), mask=inside).to(tl.int32)
    elif width == 32:
        bits = tl.load(_pointers(address, place, tl.int32, align), mask=inside)
    else:
        bits = tl.load(_pointers(address, place, tl.int8, align), mask=inside).to(tl.int32)
    return bits


@triton.jit
def _add(row, bins, counts, keep, times):
    keep = keep & (counts > 0)
    tl.atomic_add(row + bins, counts.to(tl.int64) * times, mask=keep, sem="relaxed")


@triton.jit
def _count_all(bits, chosen, row, width, mantissa, rank_offset, infinity, largest, times):
    """Count the chosen elements, whatever they are."""
    magnitude = bits & ((1 << (width - 1)) - 1).to(tl.int32)
    negative = (bits < 0).to(tl.int32)
    # An integer below 2^24 is exact in fp32: its exponent is the position of its highest bit.
    highest = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    field = magnitude >> mantissa
    bins = tl.where(field > 0, field + mantissa, highest) + rank_offset
    bins = tl.where(magnitude == 0, _POS_ZERO + negative, bins)
    bins = tl.where(magnitude == infinity, _POS_INF + negative, bins)
    bins = tl.where(magnitude > largest, _NAN, bins)
    found = tl.histogram(tl.where(chosen, bins, _ALL - 1), _ALL)
    everything = tl.arange(0, _ALL)
    _add(row, everything, found, everything < _ROW, times)


@triton.jit
def _count_tile(bits, row, width, mantissa, rank_offset, infinity, largest, times):
    """Count a whole tile."""
    magnitude = bits & ((1 << (width - 1)) - 1).to(tl.int32)
    top = tl.max(magnitude, 0)
    nonfinite = (top > largest) | (top == infinity)
    first = (top >> mantissa) - (_EXPONENTS - 1)
    # Fields below the window wrap around to huge unsigned numbers.
    local = ((magnitude >> mantissa) - first).to(tl.uint32, bitcast=True)
    local = tl.minimum(local, _REST).to(tl.int32)
    local = tl.where(magnitude == 0, _EXPONENTS + (bits < 0).to(tl.int32), local)
    found = tl.histogram(local, _WINDOW)
    window = tl.arange(0, _WINDOW)
    subnormal = tl.where(first <= 0, -first, _REST)  # the bin that the field 0 fell into
    rest = (window == _REST) | (window == subnormal) | nonfinite
    zero_bins = window - _EXPONENTS + _POS_ZERO
    bins = tl.where(window < _EXPONENTS, window + first + mantissa + rank_offset, zero_bins)
    _add(row, bins, found, rest == 0, times)
    if tl.sum(tl.where(rest, found, 0), 0) > 0:
        chosen = (local == _REST) | (local == subnormal) | nonfinite
        _count_all(bits, chosen, row, width, mantissa, rank_offset, infinity, largest, times)


@triton.jit
def _count_segments(table, counts, columns: tl.constexpr, tile: tl.constexpr, end: tl.constexpr):
    line = table + tl.program_id(0) * columns
    address = tl.load(line)
    count = tl.load(line + 1).to(tl.int32)
    row = counts + tl.load(line + 2) * _ROW
    width = tl.load(line + 3).to(tl.int32)
    mantissa = tl.load(line + 4).to(tl.int32)
    offset = tl.load(line + 5).to(tl.int32)
    infinity = tl.load(line + 6).to(tl.int32)
    largest = tl.load(line + 7).to(tl.int32)
    times = tl.load(line + 8)
    for start in range(0, end, tile):
        if start < count:
            place = start + tl.arange(0, tile)
            if (start + tile <= count) & (address % 16 == 0):
                bits = _load(address, place, None, width, 16)
                _count_tile(bits, row, width, mantissa, offset, infinity, largest, times)
            else:
                inside = place < count
                bits = _load(address, place, inside, width, 1)
                _count_all(bits, inside, row, width, mantissa, offset, infinity, largest, times)


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
    counts = torch.zeros(1, RAW_LEN, dtype=torch.int64, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton 3.9 warns of its own coming defaults
        try:
            launch([Entry(torch.zeros(1, device=device), 0, 1)], counts)
        except Exception:
            return False
    return int(counts[0, POS_ZERO]) == 1
