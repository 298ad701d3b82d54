"""The loss scale taken out of a histogram: edges move, counts do not, nothing is dropped."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampscope.ext.trackers.steps import unscaled
from ampscope.numerics.histogram import (
    ABOVE,
    BELOW,
    FIRST,
    LOWEST,
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    RAW_LEN,
)


def row(**counts: int) -> np.ndarray:
    """A raw row by hand: ``e_4=5`` is five elements in [2^-4, 2^-3), ``e4`` in [2^4, 2^5)."""
    out = np.zeros(RAW_LEN, np.int64)
    for name, count in counts.items():
        exponent = int(name[1:].replace("_", "-"))
        out[FIRST + exponent - LOWEST] = count
    return out


def test_a_scale_that_is_no_power_of_two_divides_the_edges() -> None:
    found = unscaled(row(e_4=5, e_2=7), 3.0)
    assert found.counts.tolist() == [5, 0, 7]
    assert found.edges.tolist() == pytest.approx([0.0625 / 3, 0.125 / 3, 0.25 / 3, 0.5 / 3])


def test_a_power_of_two_moves_the_edges_exactly() -> None:
    found = unscaled(row(e0=1, e10=2), 65536.0)
    assert found.edges[0] == 2.0**-16
    assert found.edges[-1] == 2.0**-5
    assert int(found.counts.sum()) == found.finite == 3


@given(
    st.lists(st.floats(2.0**-100, 2.0**60), min_size=1, max_size=50),
    st.floats(2.0**-20, 2.0**20),
)
def test_every_true_value_lies_in_its_bin(true: list[float], scale: float) -> None:
    """Oracle: the scaled values are binned by math.frexp, the true ones by numpy in the edges."""
    raw = np.zeros(RAW_LEN, np.int64)
    for value in true:
        raw[FIRST + math.frexp(value * scale)[1] - 1 - LOWEST] += 1
    found = unscaled(raw, scale)
    # One ulp: a value at an edge may be rounded to its other side by the multiplication.
    clear = [v for v in true if not np.isclose(v, found.edges, rtol=1e-15, atol=0).any()]
    counts = np.histogram(clear, found.edges)[0]
    assert (counts <= found.counts).all()
    assert int(found.counts.sum() - counts.sum()) == len(true) - len(clear)


def test_what_has_no_place_on_the_axis_is_counted_beside_it() -> None:
    raw = row(e0=4)
    raw[[POS_ZERO, NEG_ZERO, NAN, POS_INF, NEG_INF]] = [10, 1, 2, 30, 5]
    found = unscaled(raw, 2.0)
    assert (found.finite, found.zeros, found.nan, found.inf) == (4, 11, 2, 35)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0])
def test_a_scale_that_divides_nothing_is_said(scale: float) -> None:
    found = unscaled(row(e0=4), scale)
    assert found.is_unusable
    assert found.counts.size == 0
    assert not unscaled(row(), scale).is_unusable  # nothing finite, nothing left out


def test_the_open_bins_reach_to_zero_and_to_the_largest_number() -> None:
    raw = np.zeros(RAW_LEN, np.int64)
    raw[BELOW], raw[ABOVE] = 1, 2
    found = unscaled(raw, 65536.0)
    assert (found.edges[0], found.edges[-1]) == (0.0, sys.float_info.max)
    assert len(found.counts) <= 512  # wandb.Histogram.MAX_LENGTH
    assert (found.counts[0], found.counts[-1]) == (1, 2)


def test_log2_axis() -> None:
    found = unscaled(row(e_4=5), 3.0, "log2")
    assert found.edges.tolist() == pytest.approx([-4 - math.log2(3), -3 - math.log2(3)])
