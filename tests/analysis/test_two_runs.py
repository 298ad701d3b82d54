"""Two runs beside each other: from which step they differ, and in which modules most."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ampscope.analysis.two_runs import pairs, parting
from ampscope.numerics.histogram import NAN, POS_ZERO, RAW_LEN
from ampscope.records import Frame, ModuleRecord, Role, StepRecord


def steps(*losses: float | None, start: int = 0) -> list[StepRecord]:
    return [StepRecord(start + n, loss=loss) for n, loss in enumerate(losses)]


def frame(*rows: tuple[int, str, int, int, int]) -> Frame:
    """Of (module, dtype, zeros, NaNs, others)."""
    raw = np.zeros((len(rows), RAW_LEN), np.int64)
    for place, (_, _, zeros, nans, others) in enumerate(rows):
        raw[place, [POS_ZERO, NAN, 20]] = zeros, nans, others
    modules, dtypes = tuple(r[0] for r in rows), tuple(r[1] for r in rows)
    return Frame(0, Role.GRAD_OUTPUT, modules, dtypes, raw)


def test_the_same_losses_do_not_part() -> None:
    found = parting(steps(3.0, math.nan, 2.0), steps(3.0, math.nan, 2.0))
    assert (found.steps, found.first_different, found.at, found.apart) == (3, None, 2, 0.0)
    assert found.first_nonfinite == (1, 1)


def test_the_first_different_step_and_the_last_that_both_have() -> None:
    found = parting(steps(4.0, 3.0, 2.0, 1.0), steps(3.0, 2.5, math.inf, start=1))
    assert (found.steps, found.first_different) == (3, 2)
    assert (found.at, found.apart) == (2, pytest.approx(0.25))
    assert found.first_nonfinite == (None, 3)


@pytest.mark.parametrize(("one", "other"), [([], [1.0]), ([None, 1.0], [2.0, None])])
def test_without_a_common_step_nothing_is_said(
    one: list[float | None], other: list[float | None]
) -> None:
    found = parting(steps(*one), steps(*other))
    assert (found.steps, found.first_different, found.at, found.apart) == (0, None, None, None)


def test_a_loss_of_zero_has_no_relative_difference() -> None:
    assert parting(steps(0.0), steps(1.0)).apart is None


def test_modules_are_matched_by_path_and_ordered_by_difference() -> None:
    first = [ModuleRecord(n, path, "Linear", "fp32") for n, path in enumerate("abcde")]
    second = [ModuleRecord(9 - n, path, "Linear", "fp32") for n, path in enumerate("abcdf")]
    ours = frame(
        (0, "fp32", 1, 0, 9), (1, "fp32", 0, 0, 10), (2, "fp32", 0, 0, 10), (3, "fp32", 5, 0, 5)
    )
    theirs = frame(
        (9, "fp16", 2, 0, 8), (8, "fp16", 4, 0, 6), (7, "fp16", 0, 1, 9), (6, "fp32", 5, 0, 5)
    )
    found = pairs(first, second, ours, theirs)
    assert [p.path for p in found] == ["c", "b", "a", "e", "f", "d"]
    assert [p.zeros_apart for p in found] == [
        0.0,
        pytest.approx(0.4),
        pytest.approx(0.1),
        None,
        None,
        0,
    ]
    assert [p.is_alike for p in found] == [False] * 5 + [True]
    assert (found[1].first.values, found[1].second.values) == ("fp32", "fp16")
    assert (found[0].first.nonfinite, found[0].second.nonfinite) == (0, 1)
    assert (found[3].second.weights, found[4].first.weights) == (None, None)


def test_without_histograms_stored_dtypes_alone_are_compared() -> None:
    first = [ModuleRecord(0, "a", "Linear", "fp32"), ModuleRecord(1, "b", "Linear", "fp32")]
    second = [ModuleRecord(0, "a", "Linear", "fp32"), ModuleRecord(1, "b", "Linear", "fp16")]
    found = pairs(first, second, None, frame((1, "fp16", 0, 0, 1)))
    assert [p.path for p in found] == ["b", "a"]
    assert all(p.zeros_apart is None for p in found)
