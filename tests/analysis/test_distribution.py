"""Histograms at another loss scale, against what casting really does to a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampscope.analysis.distribution import (
    aligned,
    merged,
    occupied_range,
    scale_exponent,
    selected,
    shares,
    shift_between,
    trouble,
    zone_counts,
)
from ampscope.numerics.formats import FORMATS
from ampscope.numerics.histogram import (
    ABOVE,
    BELOW,
    EXPONENTS,
    FIRST,
    LOWEST,
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    RAW_LEN,
    Raw,
)
from ampscope.records import Frame, Role

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16, "e5m2": torch.float8_e5m2}


def histogram(values: np.ndarray) -> Raw:
    """Raw row of fp32 values by np.frexp: slow, and independent of the kernels."""
    row = np.zeros(RAW_LEN, np.int64)
    row[NAN] = np.isnan(values).sum()
    row[POS_INF], row[NEG_INF] = (values == np.inf).sum(), (values == -np.inf).sum()
    zero = values == 0
    row[NEG_ZERO] = (zero & np.signbit(values)).sum()
    row[POS_ZERO] = zero.sum() - row[NEG_ZERO]
    finite = np.abs(values[np.isfinite(values) & ~zero].astype(np.float64))
    exponents = np.frexp(finite)[1] - 1
    np.add.at(row, exponents - LOWEST + FIRST, 1)
    return row


def frame_of(rows: Raw, modules: tuple[int, ...], dtypes: tuple[str, ...] | None = None) -> Frame:
    return Frame(3, Role.GRAD_OUTPUT, modules, dtypes or ("fp16",) * len(modules), rows, 1024.0)


def bins(**counts: int) -> Raw:
    """``bins(e_3=5, zero=2)``: 5 elements in [2^-3, 2^-2) … written with ``m`` for minus."""
    row = np.zeros(RAW_LEN, np.int64)
    special = {"zero": POS_ZERO, "nan": NAN, "inf": POS_INF}
    for name, count in counts.items():
        place = special.get(name)
        if place is None:
            place = int(name.removeprefix("e").replace("m", "-")) - LOWEST + FIRST
        row[place] += count
    return row


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("shift", [-24, -9, -1, 0, 1, 7, 16, 30])
def test_shift_algebra_against_real_casting(name: str, shift: int) -> None:
    rng = np.random.default_rng(abs(shift) * 7 + len(name))
    spread = FORMATS[name].exponent_bits * 4
    values = rng.normal(size=60_000) * 2.0 ** rng.integers(-spread, spread // 2, 60_000)
    values = values.astype(np.float32)
    values[:50], values[50:60], values[60:64] = 0.0, np.inf, np.nan
    fmt = FORMATS[name]
    values[64] = 2.0 ** (fmt.min_subnormal_exponent - 1 - shift)  # the tie that goes to zero
    values[65] = -(2.0**fmt.min_normal_exponent) * 2.0**-shift  # smallest normal: not subnormal

    lost, subnormal, normal, overflow, zero, nonfinite = zone_counts(
        frame_of(histogram(values)[None, :], (0,)), fmt, shift
    )[0].tolist()

    finite = np.isfinite(values) & (values != 0)
    scaled = np.abs(values[finite].astype(np.float64) * 2.0**shift)
    cast = torch.from_numpy(scaled).to(CASTS[name]).to(torch.float64).numpy()
    # The two documented edges: an exact tie below the smallest subnormal rounds to zero, and
    # values of the top power of two may round past the largest number.
    ties = int((scaled == 2.0 ** (fmt.min_subnormal_exponent - 1)).sum())
    rounds_over = int((np.isinf(cast) & (scaled < 2.0 ** (fmt.max_exponent + 1))).sum())
    if fmt.min_subnormal_exponent - 1 - shift >= LOWEST:  # else fp32 itself has no such number
        assert ties >= 1
    assert lost + ties == int((cast == 0).sum())
    assert overflow + rounds_over == int(np.isinf(cast).sum())
    assert subnormal - ties == int(((cast != 0) & (scaled < fmt.min_normal)).sum())
    assert normal - rounds_over == int(((scaled >= fmt.min_normal) & np.isfinite(cast)).sum())
    assert (zero, nonfinite) == (int((values == 0).sum()), 14)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(-30, 30),
)
@settings(max_examples=40)
def test_merging_loses_no_count(modules: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed + 100)
    rows = rng.integers(0, 1000, (len(modules), RAW_LEN))
    dtypes = tuple(rng.choice(["fp16", "fp32"], len(modules)).tolist())
    frame = frame_of(rows, tuple(modules), dtypes)
    found = merged(frame)
    assert found.modules == tuple(sorted(set(modules)))
    for module, dtype, row in zip(found.modules, found.dtypes, found.rows, strict=True):
        assert (row == frame.row_of(module)).all()
        own = {d for m, d in zip(modules, dtypes, strict=True) if m == module}
        assert set(dtype.split("+")) == own


def test_selected_keeps_the_order_asked_for_and_skips_what_is_missing() -> None:
    frame = frame_of(np.arange(3 * RAW_LEN).reshape(3, RAW_LEN), (1, 4, 6), ("a", "b", "c"))
    found = selected(frame, [6, 5, 1])
    assert (found.modules, found.dtypes) == ((6, 1), ("c", "a"))
    assert (found.rows == frame.rows[[2, 0]]).all()


@pytest.mark.parametrize(
    ("recorded", "wanted", "shift"),
    [(65536.0, 16, 0), (65536.0, 0, -16), (1.0, 13, 13), (0.25, -2, 0), (1000.0, 10, 0)],
)
def test_shift_between(recorded: float, wanted: int, shift: int) -> None:
    assert shift_between(recorded, wanted) == shift


@pytest.mark.parametrize("scale", [0.0, -2.0, np.inf, np.nan])
def test_a_scale_that_is_none_has_no_exponent(scale: float) -> None:
    assert scale_exponent(scale) is None
    assert shift_between(scale, 3) is None


def test_aligned_moves_each_row_by_its_own_shift() -> None:
    rows = np.stack([bins(e0=5, em3=2), bins(e0=5, em3=2), bins(e10=1)])
    found = aligned(rows, [0, 4, -20], -12, 6)
    expected = np.zeros((3, 19), np.int64)
    expected[0, 0 + 12], expected[0, -3 + 12] = 5, 2
    expected[1, 4 + 12], expected[1, 1 + 12] = 5, 2
    expected[2, -10 + 12] = 1
    assert (found == expected).all()


def test_aligned_does_not_move_the_open_ended_bins() -> None:
    row = np.zeros(RAW_LEN, np.int64)
    row[BELOW], row[ABOVE] = 3, 4
    low, high = int(EXPONENTS[0]), int(EXPONENTS[-1])
    found = aligned(row[None, :], [50], low, high)[0]
    assert (found[0], found[-1], found.sum()) == (3, 4, 7)


def test_shares_of_an_empty_module_are_zero_not_nan() -> None:
    found = shares(np.stack([bins(e0=1, nan=3), bins()]))
    assert found[0, NAN] == 0.75
    assert not np.isnan(found).any()
    assert found[1].sum() == 0


def test_occupied_range() -> None:
    rows = np.stack([bins(em7=1), bins(e3=2, nan=1)])
    assert occupied_range(rows, [0, 0]) == (-7, 3)
    assert occupied_range(rows, [-10, 5]) == (-17, 8)
    assert occupied_range(bins(zero=9, inf=1)[None, :], [4]) is None
    rows[0, BELOW] = 1
    assert occupied_range(rows, [30, 30]) == (LOWEST - 1, 33)


def test_trouble_ranks_by_kind_before_share() -> None:
    fp16 = FORMATS["fp16"]
    rows = np.stack(
        [
            bins(e0=10),  # nothing wrong
            bins(em20=1000),  # all subnormal
            bins(em40=1, e0=999),  # one lost
            bins(e20=1, e0=99_999),  # one overflows
            bins(nan=1, e0=999_999),  # one NaN
        ]
    )
    score = trouble(zone_counts(frame_of(rows, tuple(range(5))), fmt=fp16))
    assert np.argsort(score).tolist() == [0, 1, 2, 3, 4]
    assert score[0] == 0
