"""Zeros and subnormals per module and step, from the fp32 shadow; what is known without one.

Only a reference tells a value that became zero from one that was zero already:

    lost         zero in half, not zero in the shadow; of these
      below_range  the fp32 value is below the format's smallest number: this alone is underflow
      cancelled    the format holds such values: a sum that cancelled, a ReLU that switched
                   otherwise, or values that were lost further up the pass
    subnormal    kept, with fewer mantissa bits
    zero_before  zero in both (ReLU, padding, unused rows)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ampscope.analysis.dtypes import split
from ampscope.exponents import ABOVE, FIRST, LOWEST, NEG_ZERO, POS_ZERO, Raw
from ampscope.formats import FORMATS
from ampscope.records import ShadowRecord

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class UnderflowOverTime:
    """Shadow counts of one role, each array [modules, steps]; ``total`` 0 where none was taken."""

    modules: tuple[int, ...]
    steps: tuple[int, ...]
    total: Counts
    lost: Counts
    subnormal: Counts
    zero_before: Counts
    below_range: Counts
    is_split: bool = True  # False: an older version recorded ``lost`` alone, below_range is 0

    @property
    def cancelled(self) -> Counts:
        """Lost, and not below the format's range; 0 where that was not recorded."""
        return self.lost - self.below_range if self.is_split else np.zeros_like(self.lost)

    def only(self, row: int) -> UnderflowOverTime:
        """The same of one module."""
        return UnderflowOverTime(
            modules=(self.modules[row],),
            steps=self.steps,
            total=self.total[[row]],
            lost=self.lost[[row]],
            subnormal=self.subnormal[[row]],
            zero_before=self.zero_before[[row]],
            below_range=self.below_range[[row]],
            is_split=self.is_split,
        )

    def share(self, name: str) -> NDArray[np.float64]:
        """``name`` as a share of all elements, NaN where no shadow was taken."""
        counts: Counts = getattr(self, name)
        out = np.full(counts.shape, np.nan)
        np.divide(counts, self.total, out=out, where=self.total > 0)
        return out


@dataclass(frozen=True, slots=True)
class WithoutShadow:
    """What a histogram alone says about one module's underflow.

    ``zero`` elements are zero; how many of them were lost is inconclusive, between 0 and ``zero``.
    """

    total: int
    zero: int
    subnormal: int


def underflow_over_time(records: Sequence[ShadowRecord]) -> UnderflowOverTime:
    """Records of one role as matrices; modules and steps ascending."""
    rows = [
        (r.step, r.module, r.total, r.lost, r.subnormal, r.zero_before,
         -1 if r.below_range is None else r.below_range)
        for r in records
    ]  # fmt: skip
    return from_columns(np.array(rows, np.int64).reshape(len(rows), 7))


def from_columns(columns: Counts) -> UnderflowOverTime:
    """The same from an array [records, 7]: step, module, total, lost, subnormal, zero_before,
    below_range (-1 where that was not recorded)."""
    is_split = bool((columns[:, 6] >= 0).all())
    steps, column = np.unique(columns[:, 0], return_inverse=True)
    modules, row = np.unique(columns[:, 1], return_inverse=True)

    def matrix(place: int) -> Counts:
        out = np.zeros((len(modules), len(steps)), np.int64)
        out[row, column] = columns[:, place]
        return out

    return UnderflowOverTime(
        modules=tuple(modules.tolist()),
        steps=tuple(steps.tolist()),
        total=matrix(2),
        lost=matrix(3),
        subnormal=matrix(4),
        zero_before=matrix(5),
        below_range=np.maximum(matrix(6), 0),
        is_split=is_split,
    )


def worst_modules(series: UnderflowOverTime, name: str, limit: int) -> list[int]:
    """Rows of ``series`` with the highest share of ``name`` at any step, highest first."""
    if not series.modules:
        return []
    peak = np.nan_to_num(series.share(name)).max(axis=1)
    return [int(i) for i in np.argsort(-peak, kind="stable")[:limit]]


def without_shadow(row: Raw, dtypes: str) -> WithoutShadow:
    """Counts of one module's row, recorded in ``dtypes`` (``"fp16"``, ``"fp16+fp32"``).

    A row of several dtypes is judged by the narrowest of them, the one that could have underflowed.
    """
    formats = [FORMATS[d] for d in split(dtypes) if d in FORMATS]
    subnormal = 0
    if formats:
        fmt = max(formats, key=lambda f: f.min_normal_exponent)
        first, end = (bin_of(e) for e in (fmt.min_subnormal_exponent, fmt.min_normal_exponent))
        subnormal = int(row[first:end].sum())
    return WithoutShadow(int(row.sum()), int(row[POS_ZERO] + row[NEG_ZERO]), subnormal)


def bin_of(exponent: int) -> int:
    """Index in a raw row of the bin of an exponent; the end bins take what lies beyond."""
    return min(max(exponent - LOWEST + FIRST, 0), ABOVE)
