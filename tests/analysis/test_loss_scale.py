"""What the scaler did, told from trajectories written by hand and from torch's own GradScaler."""

from __future__ import annotations

import math

import pytest
import torch

from ampscope.analysis.scale_summary import Pattern, growth_steps, summarize
from ampscope.analysis.skips import bad_steps
from ampscope.analysis.training import finite_parts
from ampscope.records import StepRecord


def run(exponents: list[int | None], skipped: str) -> list[StepRecord]:
    """One step a letter of ``skipped``: ``x`` skipped, ``.`` taken."""
    assert len(exponents) == len(skipped)
    return [
        StepRecord(i, scale=None if e is None else 2.0**e, skipped=letter == "x")
        for i, (e, letter) in enumerate(zip(exponents, skipped, strict=True))
    ]


def test_a_search_at_the_start() -> None:
    summary = summarize(run([16, 15, 14, 14, 13] + [13] * 20, "xx.x." + "." * 20))
    assert summary.pattern is Pattern.SEARCH
    assert (summary.search_skips, summary.search_steps) == (3, 4)
    assert (summary.first_scale, summary.last_scale, summary.is_steady) == (2.0**16, 2.0**13, True)
    assert summary.good_since == 21


def test_no_skip_and_no_scaler() -> None:
    summary = summarize(run([16] * 5, "....."))
    assert (summary.pattern, summary.skips, summary.is_steady) == (Pattern.NONE, (), True)
    summary = summarize(run([None] * 5, "....."))
    assert (summary.pattern, summary.last_scale) == (Pattern.NO_SCALER, None)
    assert summarize([]).pattern is Pattern.NO_SCALER


def test_skips_that_follow_growth_are_the_scaler_testing_the_ceiling() -> None:
    exponents = [16, 15, *[15] * 9, 16, *[15] * 9, 16, *[15] * 5]
    skipped = "x" + "." * 10 + "x" + "." * 9 + "x" + "." * 5
    summary = summarize(run(exponents, skipped))
    assert summary.pattern is Pattern.AFTER_GROWTH
    assert summary.growths == (11, 21)
    assert (summary.search_skips, len(summary.skips)) == (1, 3)


def test_a_skip_out_of_the_blue_is_recurring() -> None:
    summary = summarize(run([16] * 11 + [15] * 10, "." * 10 + "x" + "." * 10))
    assert summary.pattern is Pattern.RECURRING
    assert summary.skips == (10,)
    assert summary.search_skips == 0


def test_a_run_that_skips_to_the_end_never_ends() -> None:
    falling = list(range(16, 4, -1))
    summary = summarize(run([16] * 5 + falling, "....." + "x" * 12))
    assert summary.pattern is Pattern.NEVER_ENDING
    assert not summary.is_steady
    short = summarize(run([16, 15, 14], "xxx"))
    assert (short.pattern, short.good_since) == (Pattern.SEARCH, 0)


def test_growth_is_seen_at_the_step_that_uses_it() -> None:
    assert growth_steps(run([3, 3, 4, 4, 3, 5], "......")) == (2, 5)


def test_against_torch_grad_scaler() -> None:
    """Drive a real scaler with Inf at known steps; the summary must find exactly what it did."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=6)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    infinite = {0, 1, 2, 9, 22}
    steps, grown = [], []
    for step in range(30):
        scale = scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (math.inf if step in infinite else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = scaler.get_scale()
        steps.append(StepRecord(step, scale=scale, skipped=after < scale))
        if after > scale:
            grown.append(step + 1)
    summary = summarize(steps)
    assert set(summary.skips) == infinite
    assert list(summary.growths) == grown
    assert grown, "the scaler never grew: the test tests nothing"
    # It grew after 6 good steps, first used in step 9 where the next Inf lay.
    assert grown[0] == 9
    assert summary.pattern is (Pattern.AFTER_GROWTH if {9, 22} <= set(grown) else Pattern.RECURRING)


@pytest.mark.parametrize("values", [[1.0, None, math.nan, math.inf, -math.inf, 0.0]])
def test_no_point_of_a_series_is_dropped(values: list[float | None]) -> None:
    parts = finite_parts(range(6), values)
    assert (parts.steps, parts.values) == ((0, 5), (1.0, 0.0))
    assert (parts.nan_steps, parts.pos_inf_steps, parts.neg_inf_steps) == ((2,), (3,), (4,))
    assert parts.nonfinite_count == 3


def test_bad_steps_are_the_skipped_and_those_with_nonfinite_gradients() -> None:
    steps = run([4, 3, None, 3], "x...")
    found = bad_steps(steps, {0: (2, "head.weight"), 2: (1, "wte.weight")})
    assert [(b.step, b.skipped, b.parameter_count) for b in found] == [(0, True, 2), (2, False, 1)]
    assert found[1].first_parameter == "wte.weight"
    assert found[0].scale == 16.0
