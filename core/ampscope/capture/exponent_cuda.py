"""The exponent histogram on CUDA: one Triton launch over a tensor, or over many of any formats.

A program counts one *segment*, a run of elements of one tensor, and adds to the tensor's row. What
it has to know of the tensor are nine numbers::

    address  count  row  width  mantissa  rank_offset  infinity  largest  multiplicity

Of one tensor they are the launch's arguments, which costs no copy. For many the host sends a table
with one such line per segment.

`tl.histogram` of Triton 3.6 costs a ballot per bit of the index and a population count per 32 bins
for each element, so that 512 bins would be bound by arithmetic, not by memory. A tile is therefore
counted in 32 bins: both zeros, and 29 powers of two up to the largest of the segment so far, which
stay in registers from tile to tile: programs that add to one row wait for each other. What lies
outside (values 2^29 times smaller, subnormals) takes a second pass that ordinary tiles do not need;
a tile with an infinity or a NaN, and the end of a tensor, take that pass alone.
"""

# Triton's functions are compiled from their source and have no types that Python knows.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.exponent_layout import LAYOUTS
from ampscope.capture.failures import in_words
from ampscope.numerics.histogram import NAN, POS_INF, POS_ZERO, RAW_LEN

TILE = 4096  # elements counted at once: 16 a thread with 8 warps
COLUMNS = 9

_WINDOW = tl.constexpr(32)
_EXPONENTS = tl.constexpr(29)  # bins 0 … 28: exponent fields; bins 29 and 30: +0 and -0
_REST = tl.constexpr(31)  # everything else
_ALL = tl.constexpr(512)  # bins of a whole row, which `tl.histogram` wants as a power of two
_ROW = tl.constexpr(RAW_LEN)
_NO_WINDOW = tl.constexpr(1 << 20)  # below every exponent field
# Not specialized: Triton would compile further kernels for arguments that are 1 or multiples of 16.
_OF_A_TENSOR = [
    "address", "count", "row", "width", "mantissa", "rank_offset", "infinity", "largest",
    "multiplicity",
]  # fmt: skip
_POS_ZERO, _POS_INF, _NAN = tl.constexpr(POS_ZERO), tl.constexpr(POS_INF), tl.constexpr(NAN)


class Variant(NamedTuple):
    """How the kernel is compiled."""

    num_warps: int
    maxnreg: int | None  # most registers a thread; None: as many as the compiler takes
    tiles: int  # a segment: more tiles are fewer additions to the row, and fewer programs

    @property
    def segment(self) -> int:
        """Elements that a program counts."""
        return self.tiles * TILE


# The first spills on no card, and on an H200 (docs/cost.md) none is faster where many elements lie
# outside the window. There 4 warps count ordinary tensors a third faster, and spill 1.2 kB.
VARIANTS = (
    Variant(8, None, 4),
    Variant(16, 64, 4),
    Variant(4, 128, 4),
    Variant(8, 80, 4),
    Variant(16, 64, 1),
    Variant(16, 64, 16),
)
DEFAULT = VARIANTS[0]


class Counted(NamedTuple):
    """A contiguous tensor of a dtype in ``LAYOUTS`` and the row it counts for."""

    tensor: Tensor
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
def _add_window(row, found, first, mantissa, rank_offset, times):
    window = tl.arange(0, _WINDOW)
    zero_bins = window - _EXPONENTS + _POS_ZERO
    bins = tl.where(window < _EXPONENTS, window + first + mantissa + rank_offset, zero_bins)
    _add(row, bins, found, window < _REST, times)


@triton.jit
def _count_tile(bits, found, first, row, width, mantissa, rank_offset, infinity, largest, times):
    """Count a whole tile; the segment's counts in its window, and where the window begins."""
    magnitude = bits & ((1 << (width - 1)) - 1).to(tl.int32)
    top = tl.max(magnitude, 0)
    nonfinite = (top > largest) | (top == infinity)
    highest = (top >> mantissa) - (_EXPONENTS - 1)
    if (highest > first) & (nonfinite == 0):
        _add_window(row, found, first, mantissa, rank_offset, times)
        found = tl.zeros_like(found)
        first = highest
    # Fields below the window wrap around to huge unsigned numbers.
    local = ((magnitude >> mantissa) - first).to(tl.uint32, bitcast=True)
    local = tl.minimum(local, _REST).to(tl.int32)
    local = tl.where(magnitude == 0, _EXPONENTS + (bits < 0).to(tl.int32), local)
    here = tl.histogram(local, _WINDOW)
    window = tl.arange(0, _WINDOW)
    subnormal = tl.where(first <= 0, -first, _REST)  # the bin that the field 0 fell into
    rest = (window == _REST) | (window == subnormal) | nonfinite
    if tl.sum(tl.where(rest, here, 0), 0) > 0:
        chosen = (local == _REST) | (local == subnormal) | nonfinite
        _count_all(bits, chosen, row, width, mantissa, rank_offset, infinity, largest, times)
    return found + tl.where(rest, 0, here), first


@triton.jit(do_not_specialize=_OF_A_TENSOR)
def _count(
    table, counts, address: tl.int64, count: tl.int64, row: tl.int64, width: tl.int64,
    mantissa: tl.int64, rank_offset: tl.int64, infinity: tl.int64, largest: tl.int64,
    multiplicity: tl.int64, columns: tl.constexpr, tile: tl.constexpr, tiles: tl.constexpr,
):  # fmt: skip
    """A segment of the tensor at ``address``, or of the table where that is 0."""
    if address == 0:
        line = table + tl.program_id(0) * columns
        address = tl.load(line)
        count = tl.load(line + 1)
        row = tl.load(line + 2)
        width = tl.load(line + 3)
        mantissa = tl.load(line + 4)
        rank_offset = tl.load(line + 5)
        infinity = tl.load(line + 6)
        largest = tl.load(line + 7)
        multiplicity = tl.load(line + 8)
    else:
        done = tl.program_id(0).to(tl.int64) * (tiles * tile)
        address += done * (width // 8)
        count = tl.minimum(count - done, tiles * tile)
    count, width, mantissa = count.to(tl.int32), width.to(tl.int32), mantissa.to(tl.int32)
    offset, infinity, largest = (
        rank_offset.to(tl.int32), infinity.to(tl.int32), largest.to(tl.int32),
    )  # fmt: skip
    to = counts + row * _ROW
    found, first = tl.zeros([_WINDOW], tl.int32), -_NO_WINDOW
    for start in range(0, tiles * tile, tile):
        if start < count:
            place = start + tl.arange(0, tile)
            if (start + tile <= count) & (address % 16 == 0):
                bits = _load(address, place, None, width, 16)
                found, first = _count_tile(
                    bits, found, first, to, width, mantissa, offset, infinity, largest, multiplicity
                )
            else:
                inside = place < count
                bits = _load(address, place, inside, width, 1)
                _count_all(
                    bits, inside, to, width, mantissa, offset, infinity, largest, multiplicity
                )
    _add_window(to, found, first, mantissa, offset, multiplicity)


def launch(entries: Sequence[Counted], counts: Tensor, variant: Variant = DEFAULT) -> None:
    """Count all ``entries`` into ``counts`` [rows, RAW_LEN], in order with the current stream.

    Returns at once. The memory of a tensor may be given up after the call, for reuse on the same
    stream.
    """
    if len(entries) == 1:
        line = _line(entries[0])
        programs = -(-line[1] // variant.segment)
        table = counts  # of int64 as well, and not read
    else:
        lines = segment_table(entries, variant.segment)
        line, programs, table = (0,) * COLUMNS, len(lines), torch.from_numpy(lines)
        if counts.is_cuda:
            table = table.pin_memory().to(counts.device, non_blocking=True)
    # Triton's interpreter counts on a CPU.
    with torch.cuda.device(counts.device) if counts.is_cuda else nullcontext():
        _count[(programs,)](
            table, counts, *line, COLUMNS, TILE, variant.tiles,
            num_warps=variant.num_warps, maxnreg=variant.maxnreg,
        )  # fmt: skip


def segment_table(entries: Sequence[Counted], segment: int) -> NDArray[np.int64]:
    """One line per run of ``segment`` elements, [segments, COLUMNS]."""
    lines = np.array([_line(entry) for entry in entries], np.int64)
    segments = -(-lines[:, 1] // segment)
    first = np.repeat(np.cumsum(segments) - segments, segments)
    table = np.repeat(lines, segments, axis=0)
    done = (np.arange(len(table)) - first) * segment
    table[:, 0] += done * (table[:, 3] // 8)
    table[:, 1] = np.minimum(table[:, 1] - done, segment)
    return table


def _line(entry: Counted) -> tuple[int, ...]:
    tensor, bits = entry.tensor, LAYOUTS[entry.tensor.dtype]
    return (
        tensor.data_ptr(), tensor.numel(), entry.row, bits.width, bits.mantissa, bits.rank_offset,
        bits.infinity, bits.largest, entry.multiplicity,
    )  # fmt: skip


@cache
def problem(device: torch.device) -> str:
    """Why no launch works on ``device``; "" where it does. Compiles the kernel.

    Triton needs compute capability 7.0 and a C compiler, and raises errors of many kinds without
    them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton 3.9 warns of its own coming defaults
        try:
            if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
                return "Triton needs a device of compute capability 7.0 or more"
            counts = torch.zeros(1, RAW_LEN, dtype=torch.int64, device=device)
            launch([Counted(torch.zeros(1, device=device), 0, 1)], counts)
            return "" if int(counts[0, POS_ZERO]) == 1 else "it counted one zero wrongly"
        except Exception as error:
            return in_words(error)
