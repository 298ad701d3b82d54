"""The rules of forward failures: near misses, and what they say when evidence is missing."""

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
    NAN,
    OVERFLOWED,
    STEPS,
    answers,
    bad_op,
    causes,
    evidence,
    fp32_run,
    run,
    status,
    steps,
    tensor,
)
from tests.helpers.evidence_of_ops import (
    ACTIVATION,
    EPS,
    LOG_ZERO,
    LOGITS,
    MASK,
    SQUARE,
    SUM,
    WEIGHT,
    fails_forward,
    silent_square,
)

NAN_STEPS = steps((NAN,) * STEPS, **OVERFLOWED)
OPS = {
    "activation_overflow": ACTIVATION,
    "attention_logit_overflow": LOGITS,
    "mask_constant_overflow": MASK,
    "log_zero_saturation": LOG_ZERO,
    "norm_eps_underflow": EPS,
    "elementwise_overflow": replace(SQUARE, reached_loss=True),
    "reduction_overflow": SUM,
}


def firing(op: BadOp) -> list[str]:
    """The forward rules that fire when ``op`` makes every loss NaN in half alone."""
    said = answers(fails_forward(op))
    return [cause for cause in OPS if said[cause].status is Status.FOUND]


def said_of(op: BadOp) -> str:
    """What the rule of softmax logits says of ``op``."""
    return str(answers(fails_forward(op))["attention_logit_overflow"].reason)


@pytest.mark.parametrize("cause", OPS)
def test_fp32_with_the_same_failure_acquits_half_precision(cause: str) -> None:
    op = OPS[cause]
    twin = replace(op, dtype="fp32")
    assert status(cause, fails_forward(op, twin)) is not Status.FOUND


@pytest.mark.parametrize("cause", OPS)
def test_what_the_backward_pass_of_fp32_replaces_itself_acquits_nobody(cause: str) -> None:
    """A norm of zero: its derivative divides by zero, in fp32 too, and fills in zeros."""
    twin = replace(OPS[cause], dtype="fp32", phase="backward", reached_loss=False)
    assert status(cause, fails_forward(OPS[cause], twin)) is Status.FOUND


@pytest.mark.parametrize("cause", OPS)
def test_an_infinity_that_does_no_harm_is_no_fault(cause: str) -> None:
    harmless = replace(OPS[cause], reached_loss=False, reached_gradient=False)
    diagnosis = diagnose(evidence(run(steps(), harmless)))
    assert diagnosis.verdict == "no_fault"
    assert not diagnosis.findings


@pytest.mark.parametrize("cause", OPS)
def test_without_the_fp32_control_nothing_is_concluded(cause: str) -> None:
    said = answers(evidence(run(NAN_STEPS, OPS[cause]), fp32=None))[cause]
    assert said.status is Status.INCONCLUSIVE
    assert "fp32" in said.reason


@pytest.mark.parametrize("cause", OPS)
def test_without_half_precision_the_rule_does_not_apply(cause: str) -> None:
    run_in_fp32 = run(NAN_STEPS, OPS[cause], uses_autocast="")
    assert status(cause, evidence(run_in_fp32)) is Status.NOT_APPLICABLE


@pytest.mark.parametrize("cause", OPS)
def test_without_an_op_trace_no_op_is_blamed(cause: str) -> None:
    assert status(cause, evidence(run(NAN_STEPS))) is Status.PASSED


def test_a_product_with_a_weight_before_a_softmax_is_an_activation() -> None:
    linear = replace(LOGITS, inputs=(tensor(280.0), WEIGHT))
    assert firing(linear) == ["activation_overflow"]


def test_a_product_of_activations_that_meets_no_softmax_is_an_activation() -> None:
    assert firing(replace(LOGITS, consumers=("_unsafe_view", "mm", "_softmax"))) == [
        "activation_overflow"
    ]


def test_logits_may_be_scaled_and_masked_on_their_way_to_the_softmax() -> None:
    way = ("mul", "masked_fill", "view", "_softmax")
    assert firing(replace(LOGITS, consumers=way)) == ["attention_logit_overflow"]
    one_query = replace(LOGITS, consumers=way, op="aten.mv")
    assert firing(one_query) == ["attention_logit_overflow"]


def test_differences_of_logits_that_fp16_does_not_hold_are_no_masked_row() -> None:
    """Logits of 41,152 and -32,464: the logarithm of a softmax is -73,616 for one of them."""
    op = bad_op("aten._log_softmax", tensor(41152.0), neg_inf=1, fp32_max=73616.0)
    op = replace(op, reached_loss=True)
    assert firing(op) == ["elementwise_overflow"]
    said = answers(fails_forward(op))["fully_masked_row"]
    assert said.status is Status.PASSED


def test_logits_are_of_an_attention_where_values_are_weighted_by_them() -> None:
    """A contrastive loss takes a softmax over similarities, and no matmul follows it."""
    attention = said_of(replace(LOGITS, consumers=("mul", "_softmax", "expand", "bmm")))
    assert "the matmul of queries and keys" in attention
    similarities = said_of(replace(LOGITS, consumers=("div", "sub", "exp", "sum", "log")))
    assert "queries" not in similarities
    assert "The logits of a softmax overflowed" in similarities


@pytest.mark.parametrize("op", ["aten.add", "aten._to_copy", "aten.convolution"])
def test_sums_casts_and_convolutions_are_activations(op: str) -> None:
    # stable-diffusion.cpp#888: 512 channels x 9 x 0.1 x 150 = 69,120.
    assert firing(bad_op(op, tensor(150.0), fp32_max=69120.0)) == ["activation_overflow"]


@pytest.mark.parametrize("constant", [-1e4, -65504.0])
def test_a_mask_constant_that_fits_half_is_not_to_blame(constant: float) -> None:
    assert "mask_constant_overflow" not in firing(replace(MASK, scalars=(constant,)))


@pytest.mark.parametrize("constant", [-1e9, -65536.0])
def test_a_mask_constant_beyond_65504_is(constant: float) -> None:
    assert firing(replace(MASK, scalars=(constant,))) == ["mask_constant_overflow"]


def test_a_mask_constant_is_named_also_where_a_cast_made_it_infinite() -> None:
    cast = replace(
        MASK, op="aten._to_copy", inputs=(tensor(1e9),), scalars=(), fp32_max=1e9, tracked=False
    )
    for op, expected in (
        (cast, "A constant of magnitude 1e+09 of"),
        (replace(MASK, scalars=(-1e9, 0.0)), "The constant -1e+09 of"),
    ):
        found = answers(fails_forward(op))["mask_constant_overflow"]
        assert found.status is Status.FOUND
        assert found.reason.startswith(expected)


def test_bf16_holds_a_mask_constant_of_a_billion() -> None:
    wide = replace(MASK, scalars=(-1e9,), dtype="bf16")
    assert "mask_constant_overflow" not in firing(wide)


def test_torch_itself_says_that_a_mask_constant_does_not_fit() -> None:
    torch = pytest.importorskip("torch")
    scores = torch.zeros(2, dtype=torch.float16)
    with pytest.raises(RuntimeError) as caught:
        scores.masked_fill(torch.tensor([True, False]), -1e9)
    ended: dict[str, Any] = {
        "ended": "exception",
        "error_type": "RuntimeError",
        "error_line": "train.py:9",
    }
    found = diagnose(evidence(run([], **ended, error_text=str(caught.value))))
    assert causes(found) == ["mask_constant_overflow"]
    assert found.findings[0].verdict.line == "train.py:9"


def test_a_logarithm_needs_an_input_of_exactly_zero() -> None:
    smallest = tensor(0.5, zeros=0, min_abs=2.0**-24, producers=("sigmoid",))
    assert firing(replace(LOG_ZERO, inputs=(smallest,))) == []


def test_a_quotient_with_a_denominator_above_zero_overflowed() -> None:
    # 1 over half precision's smallest number, 2^-24, is 2^24: beyond 65,504.
    tiny = tensor(1.0, min_abs=2.0**-24)
    assert firing(replace(EPS, inputs=(tensor(1.0), tiny))) == ["elementwise_overflow"]


@pytest.mark.parametrize("op", ["aten.rsqrt", "aten.reciprocal"])
def test_the_argument_of_rsqrt_and_reciprocal_is_the_denominator(op: str) -> None:
    assert firing(bad_op(op, tensor(1.0, zeros=2))) == ["norm_eps_underflow"]


def test_the_square_of_255_fits_and_learning_that_keeps_up_is_no_fault() -> None:
    # 255^2 = 65,025 fits; where 256^2 = 65,536 does not, harm shows as a loss that stays behind.
    learns = evidence(run(steps(FALLING), SQUARE))
    assert status("elementwise_overflow", learns) is Status.PASSED
    assert status("elementwise_overflow", silent_square()) is Status.FOUND


def test_an_infinity_behind_which_a_result_is_wrong_is_judged_by_the_training() -> None:
    lost = replace(SQUARE, lost=0.4, lost_at="aten.rsqrt, train.py:7")
    keeps_up = diagnose(evidence(run(steps(FALLING), lost)))
    latent = [f.cause for f in keeps_up.latent]
    assert (keeps_up.verdict, latent) == ("no_fault", ["elementwise_overflow"])
    slower = [FALLING[0] - 0.8 * (FALLING[0] - loss) for loss in FALLING]
    behind = diagnose(evidence(run(steps(slower), lost)))
    assert causes(behind) == ["elementwise_overflow"]
    assert "aten.rsqrt, train.py:7 makes a finite number" in behind.findings[0].verdict.reason


def test_what_an_evaluation_loses_counts_where_most_of_a_models_result_is_wrong() -> None:
    lost = replace(SQUARE, lost=1.0, lost_at="aten.div, train.py:7", grad_enabled=False, count=1)
    found = diagnose(evidence(run(steps(FALLING), lost)))
    assert causes(found) == ["elementwise_overflow"]
    assert "an evaluation or a target" in found.findings[0].verdict.reason
    outside = replace(lost, module="", module_type="")  # the norm of a log, for one
    little = replace(lost, lost=0.4)
    for harmless in (outside, little):
        found = diagnose(evidence(run(steps(FALLING), harmless)))
        assert (found.verdict, [f.cause for f in found.latent]) == (
            "no_fault",
            ["elementwise_overflow"],
        )
    flat = diagnose(evidence(run(steps(FLAT), lost)))
    assert flat.verdict != "fault"  # whatever holds the training up, it is not the evaluation


def test_a_result_that_is_mostly_wrong_at_most_steps_needs_no_look_at_the_loss() -> None:
    lost = replace(SQUARE, lost=0.9, lost_at="aten.rsqrt, train.py:7")
    assert causes(diagnose(evidence(run(steps(FALLING), lost)))) == ["elementwise_overflow"]
    seldom = diagnose(evidence(run(steps(FALLING), replace(lost, count=3))))
    assert seldom.verdict == "no_fault"
    in_fp32 = fp32_run(None, replace(lost, dtype="fp32"))
    shared = diagnose(evidence(run(steps(FALLING), lost), in_fp32))
    assert (shared.verdict, shared.latent) == ("no_fault", ())


def test_half_precision_by_the_scripts_own_casts_is_judged() -> None:
    broken = run(steps((NAN,) * STEPS, **OVERFLOWED), ACTIVATION, uses_autocast="", half_ops=9)
    assert causes(diagnose(evidence(broken))) == ["activation_overflow"]


@pytest.mark.parametrize(("behind", "says"), [(0.15, Status.FOUND), (0.02, Status.PASSED)])
def test_a_silent_overflow_counts_where_the_loss_lags_behind_fp32s(
    behind: float, says: Status
) -> None:
    """Batch by batch, by a share of what fp32 has learned; the course alone shows nothing yet."""
    learned = FALLING[0] - FALLING[-1]
    losses = [loss + behind * learned * n / STEPS for n, loss in enumerate(FALLING)]
    made = evidence(run(steps(losses), SQUARE))
    assert not made.symptoms
    assert status("elementwise_overflow", made) is says


def test_a_silent_overflow_that_comes_once_explains_no_flat_loss() -> None:
    rare = replace(SQUARE, count=1)
    assert status("elementwise_overflow", evidence(run(steps(FLAT), rare))) is Status.PASSED


def test_a_silent_overflow_is_not_called_gradient_underflow() -> None:
    # 99 % of the gradients are zero, and no loss scale cures it.
    assert causes(diagnose(silent_square())) == ["elementwise_overflow"]


def test_the_evaluation_alone_may_show_an_overflow() -> None:
    only_there = replace(ACTIVATION, reached_loss=False, reached_gradient=False)
    made = evidence(run(steps(), only_there, eval_nonfinite=True, eval_taint=0))
    assert causes(diagnose(made)) == ["activation_overflow"]


def test_what_overflows_only_in_the_backward_pass_is_no_forward_fault() -> None:
    behind = replace(ACTIVATION, phase="backward", reached_loss=False)
    made = evidence(run(steps(FLAT, **OVERFLOWED), behind))
    assert not [c for c in OPS if answers(made)[c].status is Status.FOUND]


def test_fp32_that_fails_as_early_leaves_the_question_open() -> None:
    bad = {"grad_nonfinite": 1000, "weight_nonfinite": 1000}
    fp32 = fp32_run(steps((NAN,) * STEPS, **bad))
    made = evidence(run(NAN_STEPS, ACTIVATION), fp32)
    assert status("activation_overflow", made) is Status.INCONCLUSIVE
