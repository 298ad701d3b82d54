"""Calibration or fault, and what is advised, on trajectories written by hand."""

from __future__ import annotations

import math

import pytest

from ampscope.analysis.scale_window import ScaleWindow
from ampscope.analysis.skip_causes import SkipCause, counted, skip_causes
from ampscope.records import StepRecord
from ampscope.scalers.advice import advise, skipped_scales


def steps(*pairs: tuple[float, bool, float]) -> list[StepRecord]:
    """(scale, skipped, loss) of each step."""
    return [
        StepRecord(n, scale=scale, skipped=skipped, loss=loss)
        for n, (scale, skipped, loss) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([(8.0, True, 1.0), (4.0, True, 1.0), (2.0, False, 1.0)], ["calibration", "calibration"]),
        ([(8.0, True, math.nan), (4.0, False, 1.0)], ["fault"]),  # one bad batch
        ([(8.0, True, 1.0), (4.0, True, 1.0)], ["unclear", "unclear"]),
        ([(2.0, True, 1.0), (1.0, True, 1.0), (0.5, True, 1.0)], ["unclear", "fault", "fault"]),
        ([(4.0, False, 1.0)], []),
        ([(8.0, True, 1.0), (8.0, False, 1.0)], ["unclear"]),  # finite again at the same scale
        ([(8.0, False, 1.0), (8.0, True, 1.0), (4.0, False, 1.0)], ["unclear"]),  # and before
        ([(8.0, True, 1.0), (4.0, False, 1.0), (8.0, False, 1.0)], ["unclear"]),  # soon after
        ([(4.0, False, 1.0), (8.0, True, 1.0), (4.0, False, 1.0)], ["calibration"]),  # it had grown
    ],
)
def test_causes(made: list[tuple[float, bool, float]], expected: list[str]) -> None:
    assert list(skip_causes(steps(*made)).values()) == expected


def test_a_nan_that_no_scale_mends_is_no_calibration() -> None:
    """As torch's scaler goes on when every 7th batch has a NaN: each skip halves the scale."""
    made = [(2.0 ** (10 - n // 7), n % 7 == 6, 1.0) for n in range(40)]
    assert list(skip_causes(steps(*made)).values()) == ["unclear"] * 5


def test_optimizers_that_share_a_scaler_are_told_apart() -> None:
    """The first overflows down to 2^13, the second is finite at every scale."""
    made = [
        pair
        for exponent in (16, 15, 14, 13, 13)
        for pair in ((2.0**exponent, exponent > 13, 1.0), (2.0**exponent, False, 1.0))
    ]
    whose = {n: f"optimizer{n % 2}" for n in range(len(made))}
    assert skip_causes(steps(*made), whose) == dict.fromkeys((0, 2, 4), SkipCause.CALIBRATION)
    assert skip_causes(steps(*made)) == dict.fromkeys((0, 2, 4), SkipCause.UNCLEAR)


def test_counted() -> None:
    found = {0: SkipCause.CALIBRATION, 1: SkipCause.CALIBRATION, 9: SkipCause.FAULT}
    assert counted(found) == "2 calibrations, 1 fault"
    assert counted({}) == ""


def window(low: int, high: int) -> ScaleWindow:
    return ScaleWindow(low, high, 0, 0, ())


def test_the_first_scale_is_the_lowest_ceiling() -> None:
    given = advise([window(3, 17), window(3, 15), window(3, 16)])
    assert given is not None
    assert (given.initial_scale, given.growth_interval) == (2.0**15, 2000)


def test_gradients_that_shrink_want_a_shorter_interval() -> None:
    given = advise([window(0, 10 + n // 40) for n in range(401)])
    assert given is not None
    assert given.initial_scale == 2.0**10
    assert given.growth_interval == 40  # one doubling in 40 steps
    assert "halve in about 40 steps" in given.interval_reason
    thinned = advise([window(0, 10 + n // 4) for n in range(41)], steps_between=10)
    assert thinned is not None
    assert thinned.growth_interval == 41


def test_nothing_is_advised_without_a_window_and_a_huge_scale_never() -> None:
    assert advise([]) is None
    given = advise([window(0, 60)])
    assert given is not None
    assert given.initial_scale == 2.0**24


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        ([2.0**16], 2.0**15),
        ([2.0**16, 2.0**13, 2.0**14], 2.0**12),
        ([1.5 * 2.0**13], 2.0**13),
        ([2.0**18], 2.0**17),  # as the histograms have it
        ([], 2.0**17),
    ],
)
def test_no_scale_is_advised_at_which_the_run_skipped(
    skipped: list[float], expected: float
) -> None:
    given = advise([window(3, 17)], skipped=skipped)
    assert given is not None
    assert given.initial_scale == expected
    assert ("skipped a step" in given.scale_reason) == (expected < 2.0**17)


def test_nothing_is_advised_where_no_scale_helped() -> None:
    assert advise([window(3, 17)], skipped=[2.0, 1.0, 0.5]) is None


def test_a_loss_that_is_not_finite_says_nothing_of_the_scale() -> None:
    made = steps((8.0, True, math.nan), (4.0, True, 1.0), (2.0, False, 1.0))
    assert skipped_scales(made) == [4.0]
