"""The exponent histogram and its algebra: one count per power of two, nothing dropped.

A *raw row* is an int64 vector of length ``RAW_LEN``::

    index 0        finite, non-zero, below 2^-149      (only fp64 has such numbers)
    index 1 + k    magnitude in [2^e, 2^(e+1)) for e = -149 + k, k = 0 … 276
    index 278      finite, 2^128 or more               (only fp64)
    index 279-283  +0, -0, NaN, +Inf, -Inf

Rows add across steps, layers and ranks. Everything else is read off: multiplying a tensor by 2^k
moves its histogram by k bins, so the answer for another loss scale needs no second look at it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ampscope.numerics.formats import NumberFormat

LOWEST = -149  # exponent of the smallest fp32 subnormal
HIGHEST = 127  # exponent of the largest fp32 number
BELOW, FIRST = 0, 1
LAST = FIRST + HIGHEST - LOWEST  # 277
ABOVE = LAST + 1
POS_ZERO, NEG_ZERO, NAN, POS_INF, NEG_INF = range(ABOVE + 1, ABOVE + 6)
RAW_LEN = NEG_INF + 1
EXPONENTS: NDArray[np.int64] = np.arange(LOWEST - 1, HIGHEST + 2, dtype=np.int64)  # rows [0 … 278]

Raw = NDArray[np.int64]
Table = tuple[tuple[int, ...], tuple[str, ...], Raw]  # modules, dtypes, rows of a frame
K = TypeVar("K", bound=Hashable)
NAMES = ("lost", "subnormal", "normal", "overflow")  # of the zones, from left to right
MARGIN_BINS = 5  # room beside the outermost limit: the words "lost" and "overflow" fit in it


@dataclass(frozen=True, slots=True)
class Zones:
    """How the elements of a tensor fall into a format's four zones, and the exact special counts.

    ``lost`` rounds to zero, ``subnormal`` keeps fewer mantissa bits, ``overflow`` exceeds the
    largest number. ``zero`` was zero already. The five finite counts and ``nonfinite`` sum to
    the number of elements.
    """

    lost: int
    subnormal: int
    normal: int
    overflow: int
    zero: int
    nonfinite: int

    @property
    def total(self) -> int:
        """Number of elements."""
        return self.lost + self.subnormal + self.normal + self.overflow + self.zero + self.nonfinite

    @property
    def nonzero(self) -> int:
        """Finite non-zero elements: the base of every share of lost values."""
        return self.lost + self.subnormal + self.normal + self.overflow


def zones(raw: Raw, fmt: NumberFormat, log2_factor: int = 0) -> Zones:
    """Zones of ``raw`` in ``fmt`` after multiplication by 2^``log2_factor``.

    Exact but for two edges that a power-of-two bin cannot resolve: the single value 2^(s-1), s the
    smallest subnormal's exponent, rounds to zero and is counted as subnormal; values within half
    an ulp above the largest number overflow and are counted as normal.
    """
    return Zones(*zone_matrix(raw[None], fmt, log2_factor)[0].tolist())


def zone_matrix(rows: Raw, fmt: NumberFormat, log2_factor: int = 0) -> Raw:
    """Zones of many rows at once: [n, RAW_LEN] -> [n, 6] (lost, subnormal, normal, overflow,
    zero, nonfinite)."""
    out = np.empty((rows.shape[0], 6), dtype=np.int64)
    finite = rows[:, : ABOVE + 1]
    for column, mask in enumerate(zone_masks(fmt, log2_factor)):
        out[:, column] = finite[:, mask].sum(axis=1)
    out[:, 4] = rows[:, POS_ZERO] + rows[:, NEG_ZERO]
    out[:, 5] = rows[:, NAN : NEG_INF + 1].sum(axis=1)
    return out


def zone_masks(fmt: NumberFormat, log2_factor: int = 0) -> tuple[NDArray[np.bool_], ...]:
    """Boolean masks over rows [0 … ABOVE] for (lost, subnormal, normal, overflow)."""
    e = EXPONENTS + log2_factor
    lost = e < fmt.zero_below_exponent
    sub = (e >= fmt.zero_below_exponent) & (e < fmt.min_normal_exponent)
    over = e > fmt.max_exponent
    # The open-ended bins hold values of unknown distance: below 2^-149 nothing survives in any
    # format narrower than fp64, above 2^128 everything overflows; no shift may move them inside.
    if fmt.max_exponent <= HIGHEST:
        lost[BELOW], sub[BELOW], over[BELOW] = True, False, False
        lost[ABOVE], sub[ABOVE], over[ABOVE] = False, False, True
    return lost, sub, ~(lost | sub | over), over


@dataclass(frozen=True, slots=True)
class ExponentRange:
    """Exponents that a chart shows, both ends included."""

    lowest: int
    highest: int

    @property
    def width(self) -> int:
        """Number of exponents."""
        return self.highest - self.lowest + 1


def exponent_range(occupied: tuple[int, int] | None, fmt: NumberFormat) -> ExponentRange:
    """Wide enough for the data and for every limit of the format."""
    low, high = fmt.zero_below_exponent - MARGIN_BINS, fmt.max_exponent + MARGIN_BINS
    if occupied is not None:
        low, high = min(low, occupied[0] - 1), max(high, occupied[1] + 1)
    return ExponentRange(low, high)


def zone_spans(fmt: NumberFormat, shown: ExponentRange) -> list[tuple[str, int, int]]:
    """(zone, first exponent, exponent after the last) from left to right within ``shown``."""
    edges = (
        shown.lowest,
        fmt.zero_below_exponent,
        fmt.min_normal_exponent,
        fmt.max_exponent + 1,
        shown.highest + 1,
    )
    return list(zip(NAMES, edges[:-1], edges[1:], strict=True))


def total(raw: Raw) -> int:
    """Number of elements counted."""
    return int(raw.sum())


def max_exponent(raw: Raw) -> int | None:
    """Exponent of the largest finite magnitude, or None when there is none."""
    occupied = np.flatnonzero(raw[: ABOVE + 1])
    return None if occupied.size == 0 else int(EXPONENTS[occupied[-1]])


def min_exponent(raw: Raw) -> int | None:
    """Exponent of the smallest non-zero magnitude, or None when there is none."""
    occupied = np.flatnonzero(raw[: ABOVE + 1])
    return None if occupied.size == 0 else int(EXPONENTS[occupied[0]])


def median_exponent(raw: Raw) -> int | None:
    """Exponent of the median finite non-zero magnitude (the median to within a factor of 2)."""
    return quantile_exponent(raw, 0.5)


def quantile_exponent(raw: Raw, share: float) -> int | None:
    """Exponent of the smallest finite non-zero magnitude that at least ``share`` (0 to 1) of all
    such magnitudes do not exceed, to within a factor of 2; None when there is none."""
    finite = raw[: ABOVE + 1]
    count = int(finite.sum())
    if count == 0:
        return None
    rank = max(math.ceil(share * count), 1)
    return int(EXPONENTS[np.searchsorted(np.cumsum(finite), rank)])


def summed(tables: Sequence[Table]) -> Table:
    """Rows of the same module and dtype added up, over parameters, steps or ranks, in the order in
    which they first appear."""
    if len({(modules, dtypes) for modules, dtypes, _ in tables}) == 1:
        modules, dtypes, _ = tables[0]
        if len(set(zip(modules, dtypes, strict=True))) == len(modules):
            return modules, dtypes, np.sum([rows for _, _, rows in tables], axis=0)
    names = [key for modules, dtypes, _ in tables for key in zip(modules, dtypes, strict=True)]
    keys, total = add_rows(names, np.concatenate([rows for _, _, rows in tables]))
    return tuple(m for m, _ in keys), tuple(d for _, d in keys), total


def add_rows(keys: Iterable[K], rows: Raw) -> tuple[tuple[K, ...], Raw]:
    """The distinct keys in the order in which they first appear, and for each the sum of its rows:
    n keys and [n, RAW_LEN] -> m keys and [m, RAW_LEN]."""
    places: dict[K, int] = {}
    at = [places.setdefault(key, len(places)) for key in keys]
    total = np.zeros((len(places), RAW_LEN), np.int64)
    np.add.at(total, at, rows)
    return tuple(places), total
