"""Several optimizers, one scaler: who drags the scale down, and who suffers."""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.evidence import Evidence
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FLAT,
    OVERFLOWED,
    but,
    evidence,
    run,
    search,
    status,
    steps,
)
from tests.helpers.evidence_of_runs import two_optimizers

CAUSE = "shared_scaler_interference"


def searching(victim_zeros: int) -> Evidence:
    """The first optimizer overflows in 10 of 30 steps, from 2^24 to 2^14, and never again."""
    first = [replace(a, step=2 * a.step) for a in search(steps(), 2.0**24, 10)]
    second = [
        replace(
            a,
            step=2 * a.step + 1,
            optimizer="optimizer1",
            scale=2.0 ** (24 - min(a.step, 10)),
        )
        for a in steps(grad_zero=victim_zeros)
    ]
    return evidence(run(sorted([*first, *second], key=lambda a: a.step)))


def test_a_search_that_ends_and_harms_nobody_is_no_interference() -> None:
    assert status(CAUSE, searching(victim_zeros=0)) is Status.PASSED


def test_zeros_that_were_there_from_the_start_are_structural() -> None:
    # Half of the gradients are those of dead units: 500 of 1,000 at the highest scale too.
    assert status(CAUSE, searching(victim_zeros=500)) is Status.PASSED


def test_two_scalers_do_not_interfere() -> None:
    assert status(CAUSE, two_optimizers(own_scalers=True)) is Status.NOT_APPLICABLE


def test_one_optimizer_has_nobody_to_drag_down() -> None:
    assert status(CAUSE, evidence(run(steps(FLAT, **OVERFLOWED)))) is Status.NOT_APPLICABLE


def test_without_any_scaler_the_rule_does_not_apply() -> None:
    assert status(CAUSE, evidence(run(steps(scaler="", scale=1.0)))) is Status.NOT_APPLICABLE


def test_optimizers_that_overflow_together_share_a_fault_and_not_a_scaler() -> None:
    made = two_optimizers().baseline.steps
    both = but(made, range(60), **OVERFLOWED)
    assert status(CAUSE, evidence(run(both))) is Status.PASSED


def test_an_optimizer_of_an_earlier_phase_suffers_nothing() -> None:
    """Phase one went well; in phase two another optimizer overflows at every step."""
    first = [replace(a, grad_zero=5) for a in steps(FLAT[:20])]
    second = [
        replace(a, step=20 + a.step, optimizer="optimizer1", scale=2.0 ** (16 - a.step))
        for a in steps(FLAT[:20], **OVERFLOWED)
    ]
    assert status(CAUSE, evidence(run([*first, *second]))) is Status.PASSED
