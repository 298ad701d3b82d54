"""Lessons 2, 4, 7, 8, 9 and 10: the effect that each teaches occurs in its measurement."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ampscope.numerics.histogram import EXPONENTS, total
from ampscope.records import Histogram, NonFiniteCounts
from tests.helpers.lesson_runs import curve, measured, reading


@pytest.mark.parametrize("model", ["gpt", "lenet", "resnet"])
def test_gradients_are_far_smaller_than_weights_and_spread_wide(model: str) -> None:
    rows = {r.name: np.array(r.row) for r in measured("gradients", model=model)
            if isinstance(r, Histogram)}  # fmt: skip
    assert set(rows) == {
        "activations", "output gradients", "weight gradients", "weights", "weight updates"
    }  # fmt: skip

    def median(name: str) -> float:
        finite = rows[name][: len(EXPONENTS)]
        return float(np.median(np.repeat(EXPONENTS, finite)))

    assert median("output gradients") < median("weights") - 5
    occupied = EXPONENTS[rows["output gradients"][: len(EXPONENTS)] > 0]
    assert occupied[-1] - occupied[0] > 20
    # One count a parameter, whatever its value.
    assert (
        total(rows["weights"]) == total(rows["weight gradients"]) == total(rows["weight updates"])
    )


def test_scaler_searches_at_first_and_halves_each_time() -> None:
    found = measured("scaler", loss="sum")
    scales, skips = (curve(found, name, "torch").y for name in ("scale", "skipped"))
    assert scales[0] == 65536
    assert skips[0] == 1  # the sum's gradients overflow at once
    good = 0
    for step in range(1, len(scales)):  # torch's rule, written out
        good = 0 if skips[step - 1] else good + 1
        factor = 0.5 if skips[step - 1] else 2.0 if good == 20 else 1.0
        good = 0 if factor == 2.0 else good
        assert scales[step] == scales[step - 1] * factor, step
    losses = curve(found, "loss", "torch").y
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])  # skips or not, it learns


def test_scaler_of_a_mean_loss_is_quiet_at_first() -> None:
    skips = curve(measured("scaler", loss="mean"), "skipped", "torch").y
    assert sum(skips[:20]) == 0


def test_scaler_replayed_at_its_own_settings_is_the_measured_one() -> None:
    from app.ext.lessons.scaler import _replayed

    found = measured("scaler", loss="sum")
    made = _replayed(found, "torch", 65536.0, 20)
    assert [s.scale for s in made.steps] == list(curve(found, "scale", "torch").y)


def test_master_weights_numpy_agrees_where_a_step_is_lost() -> None:
    found = curve(measured("master"), "unchanged", "fp16")
    weights = np.random.default_rng(0).normal(0, 0.05, 20_000).astype(np.float16)
    weights = weights[np.abs(weights) > 2.0**-10]
    for x, share in zip(found.x, found.y, strict=True):
        exact = weights.astype(np.float64)
        after = (exact + exact * 2.0**x).astype(np.float16)
        assert share == pytest.approx(float((after == weights).mean()), abs=0.05), x


@pytest.mark.parametrize(("name", "bits"), [("fp32", 23), ("bf16", 7), ("fp16", 10)])
def test_master_weights_are_all_lost_from_two_bits_below_the_last_one(name: str, bits: int) -> None:
    """w < 2^(e+1), and half a spacing is 2^(e-bits-1): w·2^-(bits+2) is always less."""
    found = curve(measured("master"), "unchanged", name)
    lost = [x for x, share in zip(found.x, found.y, strict=True) if share == 1]
    assert max(lost) == -(bits + 2)


def test_master_weights_order_of_formats() -> None:
    found = measured("master")
    at = {n: curve(found, "unchanged", n).y[curve(found, "unchanged", n).x.index(-10.0)]
          for n in ("fp32", "fp16", "bf16", "e4m3")}  # fmt: skip
    assert at["fp32"] == 0
    assert at["fp32"] <= at["fp16"] <= at["bf16"] <= at["e4m3"] == 1
    assert at["bf16"] > 0.95


def test_master_weights_learn_where_bf16_weights_lag() -> None:
    found = measured("master")
    ends = {n: np.mean(curve(found, "loss", n).y[-20:])
            for n in ("fp32", "bf16", "bf16 with fp32 master weights")}  # fmt: skip
    assert ends["bf16"] > ends["fp32"] + 0.1
    assert ends["bf16 with fp32 master weights"] == pytest.approx(ends["fp32"], abs=0.02)
    assert reading(found, "moved", "bf16") < 0.5 * reading(found, "moved", "fp32")


def test_bf16_is_coarser_and_fp16_is_shorter() -> None:
    for loss in ("usual", "small"):
        found = measured("bf16", loss=loss)
        # bf16 has three mantissa bits fewer: errors about eight times as large.
        ratio = reading(found, "median error", "bf16") / reading(found, "median error", "fp16")
        assert 4 < ratio < 16
    small = measured("bf16", loss="small")
    assert reading(small, "lost", "fp16-noscaler") > 0.9
    assert reading(small, "lost", "fp16") < 0.01
    assert reading(small, "lost", "bf16") < 0.01
    from app.ext.lessons.bf16 import ratios

    assert len(ratios(small, "bf16")) == 4
    assert np.median(ratios(small, "bf16")) < 1.1
    assert np.median(ratios(small, "fp16")) < 1.1
    assert not min(ratios(small, "fp16-noscaler")) < 2


def test_gradients_quantiles_are_numpys() -> None:
    from ampscope.numerics.histogram import EXPONENTS, quantile_exponent

    rows = {r.name: np.array(r.row) for r in measured("gradients", model="gpt")
            if isinstance(r, Histogram)}  # fmt: skip
    row = rows["output gradients"]
    magnitudes = np.repeat(EXPONENTS, row[: len(EXPONENTS)])
    for share in (0.01, 0.5, 0.99):
        expected = np.quantile(magnitudes, share, method="inverted_cdf")
        assert quantile_exponent(row, share) == expected
    assert quantile_exponent(np.zeros_like(row), 0.5) is None


def counts(**asked: str) -> dict[tuple[int, str], NonFiniteCounts]:
    return {
        (t.step, t.place): t
        for t in measured("inf_to_nan", **asked)
        if isinstance(t, NonFiniteCounts)
    }


def test_one_inf_becomes_nan_and_stays() -> None:
    found = counts(scaler="without", batch="one")
    assert found[1, "input"].largest < 65504
    assert found[1, "input"].inf == found[1, "linear 1"].nan == 0
    assert found[1, "linear 1"].inf > 0
    assert found[1, "linear 2"].nan > 0
    assert found[1, "loss"].nan == 1
    assert found[1, "weights"].nan > 0
    assert found[3, "weights"].nan > 0  # healthy batches do not heal it
    assert found[3, "loss"].nan == 1


def test_the_scaler_keeps_the_weights_out_of_it() -> None:
    found = counts(scaler="with", batch="one")
    assert found[1, "weight gradients"].nan > 0
    assert found[1, "weights"].nan == 0
    run = measured("inf_to_nan", scaler="with", batch="one")
    assert reading(run, "moved", "1") == 0
    assert reading(run, "scale", "2") == reading(run, "scale", "1") / 2
    assert math.isfinite(reading(run, "loss", "3"))


def test_the_scaler_cannot_help_where_every_batch_overflows() -> None:
    run = measured("inf_to_nan", scaler="with", batch="every")
    assert [reading(run, "moved", str(step)) for step in range(4)] == [1, 0, 0, 0]
    assert math.isnan(reading(run, "loss", "3"))


@pytest.mark.parametrize("term", ["1", "0.1", "0.01"])
def test_a_half_sum_stops_where_numpys_does(term: str) -> None:
    found = measured("accumulate", term=term)
    total_, step = np.float16(0), np.float16(term)
    for number in range(8192):
        after = np.float16(total_ + step)
        if after == total_:
            assert reading(found, "stopped after", "fp16") == number
            break
        total_ = after
    assert curve(found, "sum", "fp16").y[-1] == float(total_)
    if term == "1":
        assert float(total_) == 2048
    assert math.isinf(reading(found, "stopped after", "fp32"))
    right = 8192 * float(step)
    assert reading(found, "torch.sum", "fp16") == pytest.approx(right, rel=1e-3)


def test_an_fp32_accumulator_keeps_long_products_right() -> None:
    half = curve(measured("accumulate"), "error", "half accumulator")
    wide = curve(measured("accumulate"), "error", "fp32 accumulator")
    assert max(wide.y) < 2.0**-11  # one rounding at the end
    assert half.y[-1] > 50 * wide.y[-1]
    assert half.y[-1] > half.y[0]
