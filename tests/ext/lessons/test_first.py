"""Lessons 1, 3 and 6: the effect that each teaches occurs in its measurement."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ampscope.ext.lessons.underflow import _underflow_counts
from ampscope.numerics.histogram import Raw
from ampscope.records import Curve, Histogram, UnderflowCounts
from tests.helpers.lesson_runs import curve, measured, reading


def counts(**asked: str) -> list[UnderflowCounts]:
    return [r for r in measured("underflow", **asked) if isinstance(r, UnderflowCounts)]


def test_numbers_agree_with_torch_everywhere() -> None:
    found = measured("numbers")
    for name in ("fp32", "bf16", "fp16", "e4m3", "e5m2"):
        assert reading(found, "bit patterns", name) == reading(found, "bit patterns alike", name)
        assert reading(found, "roundings", name) == reading(found, "roundings alike", name)


def test_numbers_one_stops_to_count_where_numpy_says_so() -> None:
    found = measured("numbers")
    assert reading(found, "2048 + 1", "fp16") == float(np.float16(2048) + np.float16(1)) == 2048
    first = next(2**k for k in range(16) if np.float16(2**k) + np.float16(1) == np.float16(2**k))
    assert reading(found, "1 no longer counts from", "fp16") == first
    assert reading(found, "1 no longer counts from", "fp32") == 2**24


def test_numbers_spacing_is_numpys() -> None:
    spacing = curve(measured("numbers"), "spacing", "fp16")
    expected = [float(np.log2(np.spacing(np.float16(2.0**x)))) for x in spacing.x]
    assert list(spacing.y) == expected


@pytest.mark.parametrize("model", ["gpt", "lenet"])
def test_underflow_goes_down_with_the_scale_until_it_overflows(model: str) -> None:
    found = counts(model=model, loss="small")
    assert [f.scale for f in found] == [4.0**k for k in range(21)]
    finite = [f for f in found if not f.nonfinite]
    assert len(finite) >= 10
    lost = [f.lost for f in finite]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 10 * lost[-1]
    over = next(f.scale for f in found if f.nonfinite)
    assert all(f.nonfinite for f in found if f.scale >= over)


def test_underflow_takes_most_of_a_small_loss_and_scaling_brings_it_back() -> None:
    found = {f.scale: f for f in counts(model="gpt", loss="small")}
    nonzero = found[1.0].total - found[1.0].zero_before
    assert found[1.0].lost > 0.5 * nonzero
    assert found[2.0**24].lost < 0.01 * nonzero
    # A factor on the loss is a factor on every gradient: 2^-11 is undone by a scale of 2^11 or so.
    usual = {f.scale: f for f in counts(model="gpt", loss="usual")}
    assert found[2.0**12].lost <= usual[1.0].lost <= found[2.0**10].lost


def test_underflow_is_what_numpy_makes_of_the_fp32_gradients() -> None:
    """The page moves this histogram: rounding the fp32 gradients alone must lose about as many as
    a real fp16 pass, where products underflow on the way as well."""
    (histogram,) = [r for r in measured("underflow", model="gpt") if isinstance(r, Histogram)]
    row: Raw = np.array(histogram.row, np.int64)
    below = int(row[: 1 + 149 - 25].sum())  # exponents below -25 round to zero in fp16
    first = counts(model="gpt")[0]
    assert below <= first.lost * 1.02
    assert below >= first.lost * 0.8
    assert int(row.sum()) == first.total


def test_fates_are_counted_by_hand() -> None:
    exact = torch.tensor([0.0, 1e-9, 1e-5, 1.0, 1e6])
    half = exact.half()
    found = _underflow_counts(4.0, half, exact == 0)
    assert found == UnderflowCounts("fp16", 4.0, 5, lost=1, subnormal=1, zero_before=1, nonfinite=1)


def test_half_adam_is_nan_at_once_and_autocast_learns() -> None:
    found = measured("half", optimizer="adam")
    assert reading(found, "eps", "fp16") == float(np.float16(1e-8)) == 0
    bad = curve(found, "loss", "model.half()").y
    assert math.isfinite(bad[0])
    assert all(math.isnan(loss) for loss in bad[1:])
    amp, fp32 = (curve(found, "loss", n).y for n in ("autocast + GradScaler", "fp32"))
    assert amp[-1] < 0.8 * amp[0]
    assert abs(amp[-1] - fp32[-1]) < 0.2
    assert reading(found, "accuracy", "model.half()") < 0.2
    # Only where the squared gradient is not zero in fp16 can a weight move to a number.
    zero, of = (reading(found, n, "model.half()") for n in ("squares that are zero", "gradients"))
    assert curve(found, "moved", "model.half()").y[0] <= of - zero
    # m / 0 is Inf where the gradient is not zero, and NaN where it is: PyTorch's Adam by hand.
    infinite, nan = (reading(found, n, "model.half()") for n in ("infinite weights", "NaN weights"))
    assert infinite == pytest.approx(zero, rel=0.02)  # a square's own rounding decides the rest
    assert nan == pytest.approx(61_706 - of, rel=0.02)  # weights whose gradient is zero
    from app.ext.lessons.half import cause_words

    words = cause_words(found)
    assert f"{int(infinite):,} weights are infinite" in words
    assert f"{int(nan):,} are NaN" in words


def test_half_sgd_moves_fewer_weights_at_a_rate_at_which_fp32_learns() -> None:
    found = measured("half", optimizer="sgd")
    fp32, amp = (curve(found, "loss", n).y for n in ("fp32", "autocast + GradScaler"))
    assert fp32[-1] < 0.9 * fp32[0]
    assert amp[-1] == pytest.approx(fp32[-1], rel=0.1)

    def first(name: str) -> float:
        moved, of = (curve(found, what, name).y[0] for what in ("moved", "with a gradient"))
        return moved / of

    assert first("model.half()") < 0.4
    assert first("fp32") > 0.9
    assert first("autocast + GradScaler") > 0.9


def test_half_batch_norm_overflows_where_the_square_exceeds_65504() -> None:
    found = measured("half", optimizer="sgd")
    half, fp32 = (curve(found, "running variance", n) for n in ("model.half()", "fp32"))
    assert [math.isinf(v) for v in half.y] == [x * x > 65504 for x in half.x]
    assert list(fp32.y) == pytest.approx([x * x for x in fp32.x], rel=1e-3)


def test_results_hold_no_curve_of_unequal_length() -> None:
    for name in ("numbers", "half"):
        for one in measured(name):
            assert not isinstance(one, Curve) or len(one.x) == len(one.y)
