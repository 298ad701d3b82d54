"""Two runs beside each other: from which step they differ, and in which modules most."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ampscope.ext.diff.two_runs import LossParting, pairs, parting, parting_answer
from ampscope.numerics.histogram import NAN, POS_ZERO, RAW_LEN
from ampscope.records import Frame, ModuleRecord, Role, ShadowRecord, StepRecord


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


def shadow(module: int, lost: int, below: int, total: int = 10) -> ShadowRecord:
    counts = {"lost": lost, "subnormal": 0, "zero_before": 0, "below_range": below}
    unknown = {"relative_error": None, "cosine": None, "max_abs_fp32": None}
    return ShadowRecord(0, module, Role.GRAD_OUTPUT, total, **counts, **unknown)


def test_what_underflowed_is_compared_where_both_runs_know_it() -> None:
    modules = [ModuleRecord(n, path, "Linear", "fp32") for n, path in enumerate("abcd")]
    ours = frame(*((n, "fp32", 0, 0, 10) for n in range(4)))
    theirs = frame(
        (0, "fp16", 2, 0, 8), (1, "fp16+fp32", 2, 0, 8), (2, "fp16", 9, 0, 1), (3, "fp16", 2, 0, 8)
    )
    # Of b as many were lost as of a, and fewer of them are below the range; d has no shadow.
    shadows = [shadow(0, 2, 2), shadow(1, 2, 1), shadow(2, 4, 4)]
    found = {p.path: p for p in pairs(modules, modules, ours, theirs, ((), shadows))}
    assert [p.lost_apart for p in found.values()] == [0.4, 0.2, 0.1, None]
    assert list(found) == ["c", "a", "b", "d"]
    assert (found["d"].first.lost, found["d"].second.lost) == (0.0, None)
    assert not any(p.is_alike for p in found.values())
    back = pairs(modules, modules, theirs, ours, (shadows, ()))
    assert [p.lost_apart for p in back] == [-0.4, -0.2, -0.1, None]
    same = pairs(modules, modules, theirs, theirs, (shadows, ()))
    assert all(p.is_alike for p in same)  # what one run alone has measured is no difference


def test_without_histograms_stored_dtypes_alone_are_compared() -> None:
    first = [ModuleRecord(0, "a", "Linear", "fp32"), ModuleRecord(1, "b", "Linear", "fp32")]
    second = [ModuleRecord(0, "a", "Linear", "fp32"), ModuleRecord(1, "b", "Linear", "fp16")]
    found = pairs(first, second, None, frame((1, "fp16", 0, 0, 1)))
    assert [p.path for p in found] == ["b", "a"]
    assert all(p.zeros_apart is None for p in found)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (0.02, "the old run is 75 times as high as the new run"),
        (1.35, "the old run is 11.1 % higher"),
        (3.0, "the new run is 2 times as high as the old run"),
    ],
)
def test_how_far_two_losses_are_apart_is_said_as_a_factor_or_a_share(
    second: float, says: str
) -> None:
    found = LossParting(60, 3, 59, second / 1.5 - 1, (None, None))
    assert says in parting_answer(("the old run", "the new run"), found)
