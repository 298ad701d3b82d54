"""Norm, largest magnitude and non-finite entries of large arrays, in as few passes as it takes.

A recorded step reads every weight and gradient. Summing squares in fp32 is several times as fast as
converting to fp64; where fp32 cannot hold the squares, fp64 is taken after all.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Squares that sum to no more than this may have lost terms to fp32's subnormals (2^-126, 1.2e-38).
_SMALL_SQUARE = 1e-28
# Entries summed in fp32 before fp64 takes over. Measured: sums of normal numbers are off by 4e-7,
# sums of one number over and over, whose roundings all go one way, by up to 3e-5.
PART = 1 << 16


def _dot(values: NDArray[Any]) -> float:
    """Not BLAS, whose threads would wait for the framework's own."""
    return float(np.einsum("i,i->", values, values))


def square_sum(values: NDArray[Any]) -> float:
    """Sum of the squares of all entries; NaN or Inf where one of them is."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        found = sum(_dot(values[at : at + PART]) for at in range(0, values.size, PART))
        if values.dtype == np.float64 or (_SMALL_SQUARE < found < math.inf):
            return found
        wide = values.astype(np.float64)
        return _dot(wide)


def largest(values: NDArray[Any]) -> float:
    """Largest finite magnitude; 0 where there is none."""
    if not values.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        found = max(float(values.max()), -float(values.min()))
    if math.isfinite(found):
        return found
    kept = values[np.isfinite(values)]
    return float(np.abs(kept).max()) if kept.size else 0.0


def nonfinite_count(values: NDArray[Any]) -> int:
    """NaN and infinities. Their sum is not finite either, and one sum is the cheapest look."""
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(float(values.sum())):
            return 0
    return int(values.size - np.count_nonzero(np.isfinite(values)))
