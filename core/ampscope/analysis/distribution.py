"""Histograms of one role at one step, one row per module, at any loss scale and in any format.

Values of the gradient roles are recorded multiplied by the loss scale. Dividing by it, or asking
what another scale would have done, moves every histogram by a whole number of powers of two:

    recorded at 2^16, asked about 2^13  ->  shift -3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ampscope.numerics.formats import NumberFormat
from ampscope.numerics.histogram import ABOVE, BELOW, EXPONENTS, Raw, add_rows, zone_matrix
from ampscope.records import Frame

# Columns of `histogram.zone_matrix`.
LOST, SUBNORMAL, NORMAL, OVERFLOW, ZERO, NONFINITE = range(6)


def merged(frame: Frame) -> Frame:
    """The frame with one row per module, ordered by module; dtypes of a module joined by ``+``."""
    modules, rows = add_rows(frame.modules, frame.rows)
    dtypes: dict[int, set[str]] = {module: set() for module in sorted(modules)}
    for module, dtype in zip(frame.modules, frame.dtypes, strict=True):
        dtypes[module].add(dtype)
    names = tuple("+".join(sorted(found)) for found in dtypes.values())
    return replace(frame, modules=tuple(dtypes), dtypes=names, rows=rows[np.argsort(modules)])


def selected(frame: Frame, modules: Sequence[int]) -> Frame:
    """The rows of ``modules`` that a merged frame has, in the order asked for."""
    at = {module: i for i, module in enumerate(frame.modules)}
    found = [module for module in modules if module in at]
    places = [at[module] for module in found]
    return replace(
        frame,
        modules=tuple(found),
        dtypes=tuple(frame.dtypes[i] for i in places),
        rows=frame.rows[places],
    )


def scale_exponent(scale: float) -> int | None:
    """log2 of a loss scale, to the nearest whole power of two; None when there is no such scale."""
    if not math.isfinite(scale) or scale <= 0:
        return None
    return round(math.log2(scale))


def shift_between(recorded_scale: float, wanted_exponent: int) -> int | None:
    """Powers of two by which values recorded at ``recorded_scale`` move when the loss scale becomes
    2^``wanted_exponent``; None when the recorded scale is no positive finite number.

    A recorded scale that is no power of two is taken as the nearest one: less than one bin off.
    """
    exponent = scale_exponent(recorded_scale)
    return None if exponent is None else wanted_exponent - exponent


def zone_counts(frame: Frame, fmt: NumberFormat, shift: int = 0) -> Raw:
    """[modules, 6]: lost, subnormal, normal, overflow, zero, nonfinite after the shift."""
    return zone_matrix(frame.rows, fmt, shift)


def shares(rows: Raw) -> NDArray[np.float64]:
    """Rows as shares of the module's elements; zeros for a module without any."""
    totals = rows.sum(axis=1, keepdims=True)
    out = np.zeros(rows.shape)
    np.divide(rows, totals, out=out, where=totals > 0)
    return out


def occupied_range(rows: Raw, shifts: Sequence[int]) -> tuple[int, int] | None:
    """Lowest and highest exponent over all rows, each moved by its own shift; None when no element
    is finite and non-zero. The open-ended bins stay where they are, as in :func:`aligned`."""
    occupied = rows[:, : ABOVE + 1] > 0
    exponents = EXPONENTS[None, :] + np.asarray(shifts, np.int64)[:, None]
    exponents[:, [BELOW, ABOVE]] = EXPONENTS[[BELOW, ABOVE]]
    found = exponents[occupied]
    return None if found.size == 0 else (int(found.min()), int(found.max()))


def trouble(counts: Raw) -> NDArray[np.float64]:
    """[modules] share of non-finite, overflowing, lost and subnormal elements: for ranking.

    Non-finite outweighs overflow, overflow outweighs lost, lost outweighs subnormal, whatever the
    shares: the weights differ by more than a share can make up, as a share is at most 1.
    """
    totals = np.maximum(counts.sum(axis=1), 1)
    weights = {NONFINITE: 1e9, OVERFLOW: 1e6, LOST: 1e3, SUBNORMAL: 1.0}
    score = np.zeros(len(counts))
    for column, weight in weights.items():
        share = counts[:, column] / totals
        score += weight * (share + (share > 0))
    return score


def aligned(rows: Raw, shifts: Sequence[int], lowest: int, highest: int) -> Raw:
    """Counts by exponent after each row's own shift: [n, highest - lowest + 1].

    The two open-ended bins (fp64 only) hold values of unknown distance and do not move.
    """
    out = np.zeros((len(rows), highest - lowest + 1), np.int64)
    for shift in set(shifts):
        which = np.asarray(shifts) == shift
        columns = EXPONENTS + shift - lowest
        columns[[BELOW, ABOVE]] = EXPONENTS[[BELOW, ABOVE]] - lowest
        inside = (columns >= 0) & (columns < out.shape[1])
        part = np.zeros((int(which.sum()), out.shape[1]), np.int64)
        np.add.at(part.T, columns[inside], rows[which][:, : ABOVE + 1][:, inside].T)
        out[which] = part
    return out
