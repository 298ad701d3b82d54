"""One histogram row as edges and counts, with the loss scale taken out of it.

A row counts magnitudes by powers of two, and gradients are recorded as they flowed: multiplied by
the loss scale. Dividing the *edges* by the scale gives the histogram of the true gradients, with
not one count changed, also for a scale that is no power of two::

    recorded at scale 3, 5 values in [2^-4, 2^-3)   ->   5 values in [2^-4 / 3, 2^-3 / 3)

Zeros, NaN and infinities have no place on such an axis; they are counted beside it, never dropped.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ampscope.exponents import ABOVE, EXPONENTS, NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, Raw

Axis = Literal["magnitude", "log2"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """``counts[i]`` finite non-zero elements have a magnitude in [edges[i], edges[i + 1]), or, on
    the log2 axis, the logarithm of one. Both are empty when there is no such element, and when
    ``scale`` is no number that one can divide by (``is_unusable``)."""

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    finite: int  # finite non-zero elements
    zeros: int
    nan: int
    inf: int

    @property
    def is_unusable(self) -> bool:
        """Finite elements were recorded, and the loss scale in them is unknown."""
        return self.finite > 0 and self.counts.size == 0


def unscaled(row: Raw, scale: float, axis: Axis = "magnitude") -> Histogram:
    """``row`` [RAW_LEN], recorded multiplied by ``scale``, from its first to its last occupied
    power of two."""
    finite = row[: ABOVE + 1]
    occupied = np.flatnonzero(finite)
    if occupied.size == 0 or not (math.isfinite(scale) and scale > 0):
        edges, counts = np.empty(0), np.empty(0, np.int64)
    else:
        first, end = int(occupied[0]), int(occupied[-1]) + 1
        edges, counts = _edges(scale, axis)[first : end + 1], finite[first:end]
    return Histogram(
        edges=edges,
        counts=counts,
        finite=int(finite.sum()),
        zeros=int(row[POS_ZERO] + row[NEG_ZERO]),
        nan=int(row[NAN]),
        inf=int(row[POS_INF] + row[NEG_INF]),
    )


def _edges(scale: float, axis: Axis) -> NDArray[np.float64]:
    """Left edge of every bin, and the right edge of the last: ABOVE + 2 numbers."""
    exponents = np.append(EXPONENTS, EXPONENTS[-1] + 1).astype(np.float64)
    if axis == "log2":
        return np.asarray(exponents - math.log2(scale), np.float64)
    with np.errstate(over="ignore"):
        edges = np.ldexp(1.0, exponents.astype(np.int64)) / scale
    # The two open-ended bins (fp64 only) reach to zero and to the largest number.
    edges[0], edges[-1] = 0.0, sys.float_info.max
    return np.asarray(np.minimum(edges, sys.float_info.max), np.float64)
