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

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ampscope.analysis.op_precision import split
from ampscope.numerics import histogram
from ampscope.numerics.formats import FORMATS

Counts = NDArray[np.int64]
COUNTS = ("total", "lost", "subnormal", "zero_before", "below_range")


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

    @property
    def cancelled(self) -> Counts:
        """Lost, and not below the format's range; 0 where that was not recorded."""
        return self.lost - self.below_range

    def only(self, row: int) -> UnderflowOverTime:
        """These counts of one module; ``row`` is its place in :attr:`modules`."""
        counts = {name: getattr(self, name)[[row]] for name in COUNTS}
        return replace(self, modules=(self.modules[row],), **counts)

    def share(self, name: str) -> NDArray[np.float64]:
        """``name`` as a share of all elements, NaN where no shadow was taken."""
        counts: Counts = getattr(self, name)
        out = np.full(counts.shape, np.nan)
        np.divide(counts, self.total, out=out, where=self.total > 0)
        return out


@dataclass(frozen=True, slots=True)
class WithoutShadow:
    """What a histogram alone says about one module's underflow.

    ``zero`` elements are zero; how many of them were lost is not known, between 0 and ``zero``.
    """

    total: int
    zero: int
    subnormal: int


def from_columns(columns: Counts) -> UnderflowOverTime:
    """Shadow records of one role as matrices, modules and steps ascending.

    ``columns`` is [records, 7]: step, module, total, lost, subnormal, zero_before, below_range.
    """
    steps, column = np.unique(columns[:, 0], return_inverse=True)
    modules, row = np.unique(columns[:, 1], return_inverse=True)

    counts = np.zeros((len(COUNTS), len(modules), len(steps)), np.int64)
    counts[:, row, column] = columns[:, 2:].T
    named = dict(zip(COUNTS, counts, strict=True))
    return UnderflowOverTime(tuple(modules.tolist()), tuple(steps.tolist()), **named)


def worst_modules(series: UnderflowOverTime, name: str, limit: int) -> list[int]:
    """Rows of ``series`` with the highest share of ``name`` at any step, highest first."""
    if not series.modules:
        return []
    peak = np.nan_to_num(series.share(name)).max(axis=1)
    return [int(i) for i in np.argsort(-peak, kind="stable")[:limit]]


def without_shadow(row: histogram.Raw, dtypes: str) -> WithoutShadow:
    """Counts of one module's row, recorded in ``dtypes`` (``"fp16"``, ``"fp16+fp32"``).

    A row of several dtypes is judged by the narrowest of them, the one that could have underflowed.
    """
    formats = [FORMATS[d] for d in split(dtypes) if d in FORMATS]
    subnormal = 0
    if formats:
        fmt = max(formats, key=lambda f: f.min_normal_exponent)
        first, end = (bin_of(e) for e in (fmt.min_subnormal_exponent, fmt.min_normal_exponent))
        subnormal = int(row[first:end].sum())
    return WithoutShadow(
        int(row.sum()), int(row[histogram.POS_ZERO] + row[histogram.NEG_ZERO]), subnormal
    )


def bin_of(exponent: int) -> int:
    """Index in a raw row of the bin of an exponent; the end bins take what lies beyond."""
    return min(max(exponent - histogram.LOWEST + histogram.FIRST, 0), histogram.ABOVE)
