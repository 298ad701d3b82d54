"""What counts as a symptom, and what a search for the loss scale excuses."""

from __future__ import annotations

import pytest

from ampscope.analysis.symptoms import Symptom, symptoms
from tests.evidence_making import FALLING, NAN, but, fp32_run, run, search, steps


def seen(losses: list[float], fp32: list[float] | None, skips: int) -> frozenset[Symptom]:
    """Symptoms of a run that searches its scale for so many steps."""
    control = fp32_run(None if fp32 is None else steps(fp32))
    return symptoms(run(search(steps(losses), 65536.0, skips)), control)


def test_a_loss_that_only_the_search_spoiled_is_none() -> None:
    # The gradient penalty of a WGAN is infinite at 65,536, as its gradients are.
    assert Symptom.LOSS not in seen([NAN, *FALLING[1:]], None, 3)


def test_a_loss_that_is_nan_in_fp32_too_is_one() -> None:
    assert Symptom.LOSS in seen([NAN, *FALLING[1:]], [NAN, *FALLING[1:]], 3)


@pytest.mark.parametrize("skips", [0, 1])
def test_a_loss_that_is_nan_after_the_search_is_one(skips: int) -> None:
    losses = [*FALLING[:10], NAN, *FALLING[11:]]
    assert Symptom.LOSS in seen(losses, None, skips)


def test_a_search_that_does_not_end_excuses_nothing() -> None:
    losses = [NAN] * len(FALLING)
    assert Symptom.LOSS in seen(losses, None, len(FALLING))


def test_without_the_control_nothing_is_excused() -> None:
    made = but(search(steps([NAN, *FALLING[1:]]), 65536.0, 3), [])
    assert Symptom.LOSS in symptoms(run(made), None)
