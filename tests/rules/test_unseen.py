"""Facts that tell a cause from its neighbour, found with the third set of unseen scripts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampscope.analysis.root_op import Arrives, ForwardClass, forward_class, root_op
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.diagnosis.findings import diagnose
from ampscope.observations import BadOp, GradientChange, ParameterGradient
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FALLING,
    NAN,
    STEPS,
    WITHOUT_SCALER,
    bad_op,
    but,
    causes,
    evidence,
    fp32_run,
    run,
    status,
    steps,
    tensor,
)

BAD_AT = 12
ONES = ("sum", "mul")  # a count is a sum of ones


def breaks_at(*ops: BadOp, losses_before: int = BAD_AT + 1) -> list[object]:
    """bf16 without a scaler: one step's gradients are NaN, and so is all that follows."""
    losses = [*FALLING[:losses_before], *(NAN,) * (STEPS - losses_before)]
    made = steps(losses, **WITHOUT_SCALER)
    return [but(made, range(BAD_AT, STEPS), grad_nonfinite=900, weight_nonfinite=900), *ops]


# where(valid, 1 / r2, 0): the infinity is discarded, its gradient is 0 times infinity.
DISCARDED = bad_op(
    "aten.reciprocal", tensor(31.0, zeros=29), step=BAD_AT, last_step=BAD_AT, count=1,
    dtype="fp32", fp32_finite=False, consumers=("detach", "where", "stack"),
)  # fmt: skip


def test_a_discarded_branch_that_breaks_the_weights_reached_the_gradient_first() -> None:
    made, *ops = breaks_at(DISCARDED)
    broken = run(made, *ops)  # the mark reaches later losses, through the weights
    assert root_op(broken).arrives is Arrives.GRADIENT
    found = diagnose(evidence(broken, fp32_run(made, *ops)))
    assert causes(found) == ["masked_branch_gradient"]


def test_an_op_whose_own_loss_is_not_finite_reached_the_loss() -> None:
    made, *ops = breaks_at(DISCARDED, losses_before=BAD_AT)
    assert root_op(run(made, *ops)).arrives is Arrives.LOSS


def mean_of_groups(**facts: object) -> BadOp:
    """32 means, two of them of nothing."""
    total = tensor(20.0, zeros=2, shape=(32,))
    count = tensor(25.0, min_abs=16.0, zeros=2, shape=(32,), producers=ONES)
    return bad_op(
        "aten.div", total, replace(count, **facts), nan=2, pos_inf=0, total=32, dtype="fp32",
        fp32_finite=False, step=BAD_AT, count=1,
    )  # fmt: skip


def test_a_mean_of_each_group_averages_nothing_where_a_group_is_empty() -> None:
    made, op = breaks_at(mean_of_groups(), losses_before=BAD_AT)
    found = diagnose(evidence(run(made, op), fp32_run(made, op)))
    assert causes(found)[0] == "empty_loss_reduction"


@pytest.mark.parametrize(
    "other",
    [
        {"min_abs": 0.37},  # shares, not counts
        {"producers": ("add", "sum")},  # a sum that was guarded
        {"zeros": 5},  # three of the zeros divide something
    ],
)
def test_other_divisions_by_zero_average_something(other: dict[str, object]) -> None:
    assert forward_class(mean_of_groups(**other)) is ForwardClass.EPS


def test_gradients_that_are_added_up_are_no_running_total() -> None:
    """x and x - x.mean() have a gradient each; autograd adds the small one to the large one."""
    lost = bad_op(
        "aten.add", tensor(7e-5, producers=("add", "mul")), tensor(4e-8), kind="stall",
        phase="backward", pos_inf=0, count=131, reached_loss=False, reached_gradient=False,
    )  # fmt: skip
    assert status("half_accumulation_stagnation", evidence(run(steps(), lost))) is Status.PASSED
    forward = evidence(run(steps(), replace(lost, phase="forward")))
    assert status("half_accumulation_stagnation", forward) is Status.FOUND


SCALE = 4096.0
NORMS = (0.17, 0.18, 0.33, 0.19)  # of the true gradients


def limited(left: tuple[float, ...]) -> tuple[list[object], list[object]]:
    """The first steps of a run that limits scaled gradients, and of its fp32 control."""
    changes = [
        GradientChange(i, "optimizer0", SCALE, "other", 12, norm * SCALE, rest * SCALE, 0.04, None)
        for i, (norm, rest) in enumerate(zip(NORMS, left, strict=True))
    ]
    own = [ParameterGradient(i, "optimizer0", "w", 0, 999, 0, 0, r) for i, r in enumerate(left)]
    fp32 = [ParameterGradient(i, "optimizer0", "w", 0, 999, 0, 0, n) for i, n in enumerate(NORMS)]
    return [*changes, *own], list(fp32)


def judged(left: tuple[float, ...]) -> Status:
    own, fp32 = limited(left)
    return status("clip_before_unscale", evidence(run(steps(), *own), fp32_run(None, *fp32)))


def test_a_computed_limit_meets_scaled_gradients() -> None:
    """Adaptive clipping leaves a share of the weights' norm, which is no round number."""
    assert judged((0.4956 / SCALE,) * 4) is Status.FOUND


def test_what_fp32_does_as_well_is_no_clip_of_scaled_gradients() -> None:
    assert judged(tuple(norm / 2 for norm in NORMS)) is Status.PASSED


def test_a_constant_factor_is_no_limit() -> None:
    """Unscaled by hand and once more by the scaler: another fault."""
    assert judged(tuple(norm / SCALE for norm in NORMS)) is Status.PASSED


def test_a_loss_that_was_thrown_up_and_comes_down_again_is_no_progress() -> None:
    thrown = (0.7, 64.0, 79.0, *(1.6 for _ in range(STEPS - 3)))
    assert Symptom.BEHIND in symptoms(run(steps(thrown)), fp32_run())
    assert Symptom.BEHIND not in symptoms(run(steps()), fp32_run())
