"""Zones and summaries of a histogram, against what torch's rounding does to the numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampscope.numerics.formats import BF16, E4M3, E5M2, FP16, NumberFormat
from ampscope.numerics.histogram import (
    ABOVE,
    BELOW,
    EXPONENTS,
    FIRST,
    LAST,
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    RAW_LEN,
    Raw,
    max_exponent,
    median_exponent,
    min_exponent,
    total,
    zone_matrix,
    zones,
)
from tests.helpers.exponent_oracle import row_of

DTYPES = {FP16: torch.float16, BF16: torch.bfloat16, E5M2: torch.float8_e5m2}
ANY_FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


def histogram(values: torch.Tensor) -> Raw:
    """Counted one by one: slow, and nothing in common with the counters."""
    return row_of(values.double().tolist())


def on_an_edge(value: float, fmt: NumberFormat) -> bool:
    """The two places where a bin cannot tell: the tie below the smallest subnormal, and what
    rounds over the largest number."""
    magnitude = abs(value)
    return magnitude == 2.0**fmt.zero_below_exponent or fmt.max < magnitude < 2.0 ** (
        fmt.max_exponent + 1
    )


@pytest.mark.parametrize("fmt", DTYPES, ids=lambda f: f.name)
@given(
    numbers=st.lists(ANY_FLOAT, min_size=1, max_size=30),
    log2_factor=st.integers(-20, 20),
)
def test_zones_say_what_rounding_does(
    fmt: NumberFormat, numbers: list[float], log2_factor: int
) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    scaled = values.double() * 2.0**log2_factor
    keep = torch.tensor([not on_an_edge(v, fmt) for v in scaled.tolist()])
    values, scaled = values[keep], scaled[keep]
    # fp64 to a 16-bit format may round twice, by way of fp32: not on a power of two away from ties.
    rounded = scaled.float().to(DTYPES[fmt]).double()
    found = zones(histogram(values), fmt, log2_factor)
    finite = torch.isfinite(values)
    assert found.nonfinite == int((~finite).sum())
    assert found.zero == int((values == 0).sum())
    was_number = finite & (values != 0)
    assert found.lost == int((was_number & (rounded == 0)).sum())
    assert found.overflow == int((was_number & ~torch.isfinite(rounded)).sum())
    # Subnormal before rounding: what rounds up to the smallest normal number counts as subnormal.
    below = was_number & (scaled.abs() < fmt.min_normal) & (rounded != 0)
    assert found.subnormal == int(below.sum())
    assert found.total == len(values)
    assert found.nonzero == found.lost + found.subnormal + found.normal + found.overflow


@pytest.mark.parametrize("fmt", [*DTYPES, E4M3], ids=lambda f: f.name)
@given(st.integers(0, 2**32 - 1), st.integers(-300, 300))
def test_many_rows_at_once(fmt: NumberFormat, seed: int, log2_factor: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 9, (5, RAW_LEN))
    matrix = zone_matrix(rows, fmt, log2_factor)
    for row, expected in zip(rows, matrix, strict=True):
        z = zones(row, fmt, log2_factor)
        assert [z.lost, z.subnormal, z.normal, z.overflow, z.zero, z.nonfinite] == expected.tolist()
        assert z.total == total(row) == row.sum()


@pytest.mark.parametrize("log2_factor", [-400, -1, 0, 1, 400])
def test_no_factor_moves_the_open_ended_bins_inside(log2_factor: int) -> None:
    row = np.zeros(RAW_LEN, np.int64)
    row[BELOW], row[ABOVE] = 3, 5
    found = zones(row, FP16, log2_factor)
    assert (found.lost, found.overflow, found.normal, found.subnormal) == (3, 5, 0, 0)


@given(st.lists(ANY_FLOAT, max_size=40))
def test_extremes_and_median(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    row = histogram(values)
    finite = values[torch.isfinite(values) & (values != 0)].abs().double()
    if not len(finite):
        assert max_exponent(row) is min_exponent(row) is median_exponent(row) is None
        return
    assert max_exponent(row) == math.frexp(finite.max().item())[1] - 1
    assert min_exponent(row) == math.frexp(finite.min().item())[1] - 1
    assert median_exponent(row) == math.frexp(finite.median().item())[1] - 1  # the lower median


def test_the_bins_cover_fp32_without_gap() -> None:
    assert EXPONENTS[FIRST] == -149
    assert EXPONENTS[LAST] == 127
    assert (np.diff(EXPONENTS) == 1).all()
    assert sorted({BELOW, ABOVE, POS_ZERO, NEG_ZERO, NAN, POS_INF, NEG_INF}) == [
        0,
        *range(278, 284),
    ]
    assert RAW_LEN == 284
