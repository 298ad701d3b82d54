"""Copies that are older than their weights: harm, a loss that is latent so far, and neither."""

from __future__ import annotations

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.diagnosis.findings import diagnose
from ampscope.observations import (
    STALE_CACHED,
    STALE_KEPT,
    STALE_MODEL,
    Call,
    Observation,
    OpUse,
)
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    FP32_LOOP,
    STEPS,
    WITHOUT_SCALER,
    answers,
    evidence,
    log,
    run,
    steps,
)

CAUSE = "stale_low_precision_copy"


def seen(
    losses: tuple[float, ...], *others: Observation, calls: list[Call] | None = None
) -> Evidence:
    made = steps(losses, **WITHOUT_SCALER)
    return evidence(run(made, *others, calls=calls, uses_autocast="bf16"))


def use(name: str, step: int, count: float) -> OpUse:
    return OpUse(name, "aten.mm", "fc", "train.py:7", step, count, 0.2, 3)


@pytest.mark.parametrize("name", [STALE_CACHED, STALE_KEPT])
@pytest.mark.parametrize(
    ("losses", "count", "status"),
    [
        (FALLING, STEPS - 1, Status.FOUND),  # at nearly every step, whatever the loss does
        (FALLING, 2, Status.LATENT),  # a metric now and then
        (FLAT, 2, Status.FOUND),
    ],
)
def test_few_stale_steps_of_a_training_that_learns_are_latent(
    name: str, losses: tuple[float, ...], count: int, status: Status
) -> None:
    found = answers(seen(losses, use(name, 1, count)))[CAUSE]
    assert found.status is status
    assert found.line == "train.py:7"
    assert found.fix.controls == ("fresh_casts",)


def test_a_half_model_is_named_at_its_cast() -> None:
    stale = OpUse(STALE_MODEL, "", "", "", 1, STEPS - 1, 0.2, 3)
    cast = Call(0, 0, "cast", dtype="bf16", line="train.py:12")
    diagnosis = diagnose(seen(FALLING, stale, calls=[cast, *log(FP32_LOOP)]))
    assert [f.cause for f in diagnosis.findings] == [CAUSE]
    assert diagnosis.findings[0].verdict.line == "train.py:12"


def test_fresh_copies_are_no_fault() -> None:
    assert answers(seen(FALLING))[CAUSE].status is Status.PASSED
