"""Three numbers of underflow: never mixed, never guessed where there was no shadow."""

from __future__ import annotations

import numpy as np

from ampscope.analysis.underflow import (
    UnderflowOverTime,
    bin_of,
    from_columns,
    without_shadow,
    worst_modules,
)
from ampscope.numerics.histogram import FIRST, LOWEST, NEG_ZERO, POS_ZERO, RAW_LEN
from ampscope.records import Role, ShadowRecord


def shadow(step: int, module: int, lost: int, subnormal: int, zero: int) -> ShadowRecord:
    return ShadowRecord(
        step, module, Role.GRAD_OUTPUT, 100, lost, subnormal, zero, None, None, None
    )


def underflow_over_time(records: list[ShadowRecord]) -> UnderflowOverTime:
    rows = [
        (r.step, r.module, r.total, r.lost, r.subnormal, r.zero_before, r.below_range)
        for r in records
    ]  # fmt: skip
    return from_columns(np.array(rows, np.int64).reshape(len(rows), 7))


RECORDS = [shadow(0, 7, 1, 2, 3), shadow(10, 7, 4, 5, 6), shadow(10, 2, 50, 0, 0)]


def test_matrices_hold_each_record_in_its_place() -> None:
    series = underflow_over_time(RECORDS)
    assert (series.modules, series.steps) == ((2, 7), (0, 10))
    assert series.lost.tolist() == [[0, 50], [1, 4]]
    assert series.subnormal.tolist() == [[0, 0], [2, 5]]
    assert series.zero_before.tolist() == [[0, 0], [3, 6]]
    assert series.total.tolist() == [[0, 100], [100, 100]]


def test_lost_is_below_range_or_cancelled() -> None:
    records = [
        ShadowRecord(0, 7, Role.GRAD_OUTPUT, 100, 9, 0, 0, None, None, None, below_range=4),
        ShadowRecord(3, 7, Role.GRAD_OUTPUT, 100, 2, 0, 0, None, None, None, below_range=2),
    ]
    series = underflow_over_time(records)
    assert (series.below_range.tolist(), series.cancelled.tolist()) == ([[4, 2]], [[5, 0]])
    assert series.only(0).cancelled.tolist() == [[5, 0]]


def test_a_share_without_a_shadow_is_nan_not_zero() -> None:
    share = underflow_over_time(RECORDS).share("lost")
    assert np.isnan(share[0, 0])
    assert share[0, 1] == 0.5
    assert share[1].tolist() == [0.01, 0.04]


def test_worst_modules_by_the_number_asked_for() -> None:
    series = underflow_over_time(RECORDS)
    assert worst_modules(series, "lost", 5) == [0, 1]
    assert worst_modules(series, "subnormal", 5) == [1, 0]
    assert worst_modules(series, "zero_before", 1) == [1]


def test_nothing_recorded() -> None:
    series = underflow_over_time([])
    assert (series.modules, series.steps, series.total.shape) == ((), (), (0, 0))
    assert worst_modules(series, "lost", 5) == []


def test_without_a_shadow_zeros_are_only_an_upper_bound() -> None:
    row = np.zeros(RAW_LEN, np.int64)
    row[POS_ZERO], row[NEG_ZERO] = 30, 12
    for exponent, count in ((-25, 1), (-24, 2), (-15, 4), (-14, 8), (0, 16)):
        row[exponent - LOWEST + FIRST] = count
    known = without_shadow(row, "fp16")
    assert (known.total, known.zero, known.subnormal) == (73, 42, 6)
    assert without_shadow(row, "bf16").subnormal == 0
    assert without_shadow(row, "fp16+fp32").subnormal == 6  # judged by the narrower
    assert without_shadow(row, "?").subnormal == 0


def test_bin_of_stays_inside_the_row() -> None:
    assert bin_of(-149) == FIRST
    assert bin_of(-400) == 0
    assert bin_of(400) == FIRST + 127 + 149 + 1
