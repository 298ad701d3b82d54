"""The window of loss scales, against trying every scale on the numbers themselves in fp16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampscope.analysis.scale_window import (
    ScaleWindow,
    common_window,
    excluded_modules,
    module_windows,
)
from ampscope.numerics.formats import FORMATS
from ampscope.records import Frame, Role
from app.runs.loss_scales import window_sentence
from tests.helpers import exponent_oracle as oracle

FP16 = FORMATS["fp16"]


def frame(*modules: list[float], scale: float = 1.0, dtypes: tuple[str, ...] = ()) -> Frame:
    rows = np.stack([oracle.row_of(values) for values in modules])
    kept = dtypes or ("fp32",) * len(modules)
    return Frame(0, Role.GRAD_OUTPUT, tuple(range(len(modules))), kept, rows, scale)


def suits(values: list[float], exponent: int) -> bool:
    """Whether fp16 holds all of them, times 2^exponent."""
    scaled = torch.tensor(values, dtype=torch.float64) * 2.0**exponent
    half = scaled.to(torch.float16)
    return bool(torch.isfinite(half).all()) and not bool(((half == 0) & (scaled != 0)).any())


powers = st.integers(-40, 10).map(lambda e: 1.5 * 2.0**e)  # away from the edges of a bin


@settings(max_examples=60)
@given(st.lists(st.lists(powers, min_size=1, max_size=4), min_size=1, max_size=3))
def test_every_scale_in_the_window_suits_and_none_outside(modules: list[list[float]]) -> None:
    window = common_window(frame(*modules), FP16)
    good = [e for e in range(-60, 80) if all(suits(values, e) for values in modules)]
    assert window is not None
    if len(good) < 2:  # the top bin is left free, as values in it may round to infinity
        assert window.low > window.high or (window.low, window.high) == (good[0], good[0])
        return
    assert not window.spans
    assert (window.low, window.high) in {(good[0], good[-1]), (good[0], good[-1] - 1)}


def test_the_scale_in_the_recorded_gradients_counts() -> None:
    plain, scaled = frame([1.5e-6]), frame([1.5e-6 * 2.0**16], scale=2.0**16)
    assert common_window(plain, FP16) == common_window(scaled, FP16)


def test_gradients_that_are_not_finite_have_no_window() -> None:
    assert common_window(frame([1.0, float("inf")]), FP16) is None
    assert common_window(frame([0.0, 0.0]), FP16) is None


@pytest.mark.parametrize(
    ("window", "says"),
    [
        (ScaleWindow(4, 19, 0, 1, ()), "from 2^4 to 2^19 keep the output gradients of"),
        (ScaleWindow(20, 12, 0, 1, ()), "embed needs at least 2^20, head can take at most 2^12"),
        (
            ScaleWindow(4, 19, 0, 1, (1, 0)),
            "keeps the output gradients of head and 1 more in fp16",
        ),
    ],
)
def test_the_sentence_names_who_sets_the_window(window: ScaleWindow, says: str) -> None:
    assert says in window_sentence(window, {0: "embed", 1: "head"}, "fp16", "output gradients")


def test_a_scale_that_has_fallen_to_zero_leaves_no_window() -> None:
    """torch's scaler halves without a lower bound: 165 skipped steps make 65536 zero."""
    assert common_window(frame([0.5], scale=0.0), FP16) is None


def test_what_flows_in_fp32_closes_no_window() -> None:
    """A head under autocast(enabled=False) may have gradients of 2^17: fp32 holds them."""
    made = frame([1.5], [1.5 * 2.0**17], dtypes=("fp16", "fp32"))
    alone = frame([1.5], dtypes=("fp16",))
    assert common_window(made, FP16) == common_window(alone, FP16)
    assert [window.module for window in module_windows(made, FP16)] == [0]


def test_the_sentence_says_which_modules_the_window_excludes() -> None:
    """The loss has a gradient of 1 in fp32 under autocast; 2^16 times that is too much for fp16."""
    made = frame([1.5], [1.0], [1.5], scale=1.0, dtypes=("fp16", "fp32", "fp32"))
    window, excluded = common_window(made, FP16), excluded_modules(made, FP16)
    assert window is not None
    assert excluded == {1: "fp32", 2: "fp32"}
    said = window_sentence(window, {0: "head", 1: "loss"}, "fp16", "output gradients", excluded)
    assert said.endswith("Excluded, with gradients in fp32: loss and 1 more.")
    alone = window_sentence(window, {0: "head"}, "fp16", "output gradients", {})
    assert said.startswith(alone)
    assert "Excluded" not in alone


def test_a_module_that_counts_in_one_of_its_dtypes_is_not_excluded() -> None:
    made = frame([1.5], [1.5], [0.0], dtypes=("fp16", "fp32", "fp32"))
    both = replace(made, modules=(0, 0, 1))
    assert excluded_modules(both, FP16) == {}
    assert excluded_modules(frame([1.5], [2.0]), FP16) == {}


def test_without_any_in_the_format_all_count() -> None:
    """Of a run in fp32: what fp16 would hold."""
    made = frame([1.5], [1.5 * 2.0**10])
    window = common_window(made, FP16)
    assert window is not None
    assert window.highest == 1
    assert len(module_windows(made, FP16)) == 2


def test_weight_gradients_limit_the_scale_from_above_alone() -> None:
    """As a batch of 2048 large inputs makes them: far larger than the gradients of the output."""
    outputs = frame([1.5e-4], [1.5e-4], dtypes=("fp16", "fp16"))
    weights = frame([1e-9], [1.5 * 2.0**3])
    plain, window = common_window(outputs, FP16), common_window(outputs, FP16, weights)
    assert plain is not None
    assert window is not None
    assert (window.low, window.highest) == (plain.low, 1)
    for exponent in range(-4, 20):
        if exponent <= window.high:
            assert suits([1.5e-4, 1.5 * 2.0**3], exponent)
    assert not suits([1.5 * 2.0**3], window.high + 2)


def test_weight_gradients_of_modules_in_fp32_do_not_count() -> None:
    outputs = frame([1.5], [1.5], dtypes=("fp16", "fp32"))
    window = common_window(outputs, FP16)
    assert common_window(outputs, FP16, frame([1.5], [1.5 * 2.0**14])) == window
    assert common_window(outputs, FP16, frame([1.5], [float("inf")])) is None
