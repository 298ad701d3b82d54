"""Failures of the backward pass: singular, discarded, or a matter of scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ampscope.diagnosis.findings import diagnose
from ampscope.observations import BadOp
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    LINE,
    NAN,
    OVERFLOWED,
    STEPS,
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
from tests.helpers.evidence_of_ops import BRANCH, SLOPE, STEEP, skips_with_finite_loss

BY_GRADIENT = ("singular_gradient", "masked_branch_gradient", "loss_scale_too_high",
               "loss_magnitude_overflow")  # fmt: skip


@pytest.mark.parametrize("cause", BY_GRADIENT)
def test_the_control_in_fp32_is_asked_for(cause: str) -> None:
    made = evidence(run(steps(FLAT, **OVERFLOWED), SLOPE), fp32=None)
    assert status(cause, made) is Status.INCONCLUSIVE


def test_a_slope_that_only_half_precision_finds_infinite_is_raised_by_an_eps() -> None:
    found = diagnose(skips_with_finite_loss(SLOPE)).findings[0]
    assert found.cause == "singular_gradient"
    assert found.verdict.fix.kind == "raise_eps"
    assert "eps:0.0001" in found.verdict.fix.controls


@pytest.mark.parametrize("node", ["LinalgVectorNormBackward0", "RsqrtBackward0", "Atan2Backward0"])
def test_norm_rsqrt_and_atan2_are_singular_at_zero_as_sqrt_is(node: str) -> None:
    assert causes(diagnose(skips_with_finite_loss(replace(SLOPE, node=node)))) == [
        "singular_gradient"
    ]


def test_a_backward_product_that_fp32_holds_is_a_matter_of_scale() -> None:
    made = skips_with_finite_loss(replace(STEEP, node="SqrtBackward0"))
    assert status("singular_gradient", made) is Status.PASSED
    assert status("masked_branch_gradient", made) is Status.PASSED


@pytest.mark.parametrize(
    ("size", "line", "says"),
    [
        (500.0, LINE, Status.FOUND),  # 1 / x near 0.002: its derivative is 250,000
        (5000.0, LINE, Status.PASSED),  # a gradient that large came in
        (500.0, "train.py:99", Status.PASSED),  # at a scale of 1 another op overflows
    ],
)
def test_a_derivative_that_half_cannot_hold_at_a_scale_of_1_is_singular(
    size: float, line: str, says: Status
) -> None:
    slope = replace(STEEP, node="ReciprocalBackward0", line=LINE)
    bare = replace(slope, inputs=(tensor(size), tensor(size)), line=line)
    frozen = run(steps(FLAT, **OVERFLOWED), bare, control="scale:1")
    made = evidence(run(steps(FLAT, **OVERFLOWED), slope), **{"scale:1": frozen})
    assert status("singular_gradient", made) is says
    assert status("singular_gradient", skips_with_finite_loss(slope)) is Status.PASSED


@pytest.mark.parametrize(
    "facts",
    [
        {"fp32_finite": True, "fp32_max": 1e5},  # fp16 overflows
        {"inputs": (tensor(1e30), tensor(1e30))},  # fp32 overflows as well
    ],
)
def test_an_overflow_of_a_product_is_not_singular(facts: dict[str, Any]) -> None:
    product = replace(SLOPE, op="aten.mul", node="MulBackward0", **facts)
    assert status("singular_gradient", skips_with_finite_loss(product)) is Status.PASSED


@pytest.mark.parametrize(
    ("op", "node", "words"),
    [
        ("aten.div", "XlogyBackward0", "log"),
        ("aten.linalg_lu_solve", "LinalgSolveExBackward0", "identity"),
        ("aten.div", "LinalgSvdBackward0", "singular values"),
        ("aten.reciprocal", "LinalgEighBackward0", "eigenvalues"),
        ("aten.mul", "SomethingNewBackward0", "epsilon"),
    ],
)
def test_a_derivative_that_fp32_does_not_have_either_is_singular_whatever_it_is_of(
    op: str, node: str, words: str
) -> None:
    slope = replace(SLOPE, op=op, node=node, dtype="fp32", nan=4, pos_inf=0)
    found = diagnose(skips_with_finite_loss(slope)).findings[0]
    assert found.cause == "singular_gradient"
    assert found.verdict.line == LINE
    assert words in found.verdict.fix.text


def test_a_value_that_fp32_does_not_have_either_and_an_index_leaves_out_is_a_branch() -> None:
    solve = bad_op(
        "aten._linalg_solve_ex", tensor(17.0, zeros=8), tensor(21.0), nan=4, pos_inf=0,
        dtype="fp32", fp32_finite=False, module="", consumers=("detach", "eq", "view"),
        reached_loss=False,
    )  # fmt: skip
    dead = {"grad_nonfinite": 16, "grad_norm": None, "weight_nonfinite": 16}
    fp32 = fp32_run(but(steps((*FALLING[:9], *(NAN,) * 21)), range(8, 30), **dead),
                    replace(solve, step=8))  # fmt: skip
    rare = but(steps(), [8], **OVERFLOWED)  # a scaler skips the step, and the run trains on
    made = evidence(run(rare, replace(solve, step=8)), fp32)
    assert not made.symptoms
    found = diagnose(made).findings
    assert [f.cause for f in found] == ["masked_branch_gradient"]
    assert "identity" in found[0].verdict.fix.text
    # Half precision alone overflows there, and nothing shows that it was left out.
    alone = replace(solve, fp32_finite=True, dtype="fp16", nan=0, pos_inf=4, step=8)
    assert status("masked_branch_gradient", evidence(run(rare, alone), fp32)) is Status.PASSED


def test_a_gradient_of_zero_from_where_is_a_discarded_branch() -> None:
    # 0 * inf is NaN: the derivative of exp is infinite where its branch was not taken.
    product = bad_op(
        "aten.mul", tensor(1.0, zeros=9, producers=("where",)), tensor(9.0), phase="backward",
        node="ExpBackward0", nan=9, pos_inf=0, fp32_finite=False, reached_loss=False, module="",
    )  # fmt: skip
    assert causes(diagnose(skips_with_finite_loss(product))) == ["masked_branch_gradient"]


def test_a_power_whose_nan_a_mask_discarded_is_a_discarded_branch() -> None:
    # The derivative of a power of a negative number is NaN whatever gradient comes in.
    slope = replace(SLOPE, op="aten.pow", node="PowBackward0", nan=9, inputs=(tensor(1.0),), id=1)
    value = bad_op("aten.pow", tensor(1.0), nan=9, pos_inf=0, consumers=("neg", "where"),
                   reached_loss=False, reached_gradient=False, module="")  # fmt: skip

    def found(*ops: BadOp) -> list[str]:
        return causes(diagnose(evidence(run(steps(FLAT, **OVERFLOWED), *ops))))

    assert found(value, slope) == ["masked_branch_gradient"]
    assert found(replace(value, line="train.py:19"), slope) == ["singular_gradient"]
    assert found(replace(value, op="aten.exp"), slope) == ["singular_gradient"]
    assert found(replace(value, consumers=("mul",)), slope) == ["singular_gradient"]


def test_an_infinite_branch_that_is_taken_is_an_overflow() -> None:
    taken = replace(BRANCH, reached_loss=True, consumers=("mul",))
    made = evidence(run(steps((NAN,) * STEPS, **OVERFLOWED), taken))
    assert causes(diagnose(made)) == ["elementwise_overflow"]


def test_without_an_op_trace_no_gradient_is_explained() -> None:
    made = evidence(run(steps(FLAT, **OVERFLOWED)))
    assert status("singular_gradient", made) is Status.PASSED
    assert status("masked_branch_gradient", made) is Status.PASSED


def test_a_discarded_branch_of_a_root_is_no_singularity() -> None:
    product = bad_op(
        "aten.div", tensor(1.0, zeros=9, producers=("where",)), tensor(9.0), phase="backward",
        node="SqrtBackward0", nan=9, pos_inf=0, fp32_finite=False, reached_loss=False, module="",
    )  # fmt: skip
    assert causes(diagnose(skips_with_finite_loss(product))) == ["masked_branch_gradient"]
