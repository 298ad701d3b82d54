"""What was lost first is the cause, and not what became infinite or NaN first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampscope.observations import HalfSite, OpUse, ParameterGradient
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    BACKWARD,
    DIRECT_STEP,
    FALLING,
    FLAT,
    LINE,
    MODULE,
    NAN,
    OVERFLOWED,
    SCALE,
    STEP,
    STEPS,
    UPDATE,
    WITHOUT_SCALER,
    ZERO,
    answers,
    bad_op,
    causes,
    diagnose,
    evidence,
    fp32_run,
    log,
    run,
    status,
    steps,
    tensor,
)

LOST = bad_op(
    "aten.add", tensor(1.0), kind="cancelled", error=1.0, share=1.0, fp32_max=2e-4, pos_inf=0,
    nan=0, reached_loss=False, reached_gradient=True, consumers=("sqrt", "div"),
)  # fmt: skip
BROKEN = steps((NAN,) * STEPS, **OVERFLOWED)
SITE = HalfSite(
    "cast", LINE, "Tensor.half", "fp16", role="labels", elements=4000, changed=976, merged=976,
    distinct=4000, whole=True, largest=3999.0,
)  # fmt: skip


def test_a_cancelled_difference_without_harm_is_no_fault() -> None:
    assert status("cancellation", evidence(run(steps(), LOST))) is Status.PASSED


def test_one_that_no_gradient_comes_back_through_explains_nothing() -> None:
    unused = replace(LOST, reached_gradient=False)
    assert status("cancellation", evidence(run(steps(FLAT), unused))) is Status.PASSED


@pytest.mark.parametrize(
    ("losses", "says"),
    [(FALLING, Status.LATENT), (FALLING[:5], Status.FOUND), (FLAT, Status.FOUND)],
)
def test_first_gradients_that_are_wrong_are_latent_where_the_training_keeps_up(
    losses: tuple[float, ...], says: Status
) -> None:
    """In few steps, or where it does not learn, nothing clears them."""
    made = {
        sign: ParameterGradient(0, "optimizer0", "a.weight", 0, 64, 0, 0, None, (sign,) * 64)
        for sign in (1.0, -1.0)
    }
    fp32 = fp32_run(steps(losses, **WITHOUT_SCALER), made[1.0])
    wrong = evidence(run(steps(losses), LOST, made[-1.0]), fp32)
    assert not wrong.symptoms
    assert status("cancellation", wrong) is says


def test_a_line_that_was_lifted_in_vain_is_not_the_cause() -> None:
    made = evidence(run(steps(FLAT), LOST))
    made.runs[f"fp32_lines:{LINE}"] = run(steps(FLAT))
    assert status("cancellation", made) is Status.PASSED
    made.runs[f"fp32_modules:{MODULE}"] = run(steps())  # and the whole module heals
    assert status("cancellation", made) is Status.FOUND


def test_the_root_of_a_negative_number_is_the_cancellations() -> None:
    root = bad_op("aten.sqrt", tensor(2.0), id=1, pos_inf=0, nan=15, line="train.py:19")
    found = diagnose(evidence(run(BROKEN, LOST, root)))
    assert causes(found) == ["cancellation"]
    assert found.findings[0].verdict.line == LINE


def test_an_overflow_beside_a_cancellation_stays_an_overflow() -> None:
    square = bad_op("aten.pow", tensor(900.0), id=1, line="train.py:19")
    assert causes(diagnose(evidence(run(BROKEN, LOST, square)))) == ["elementwise_overflow"]


def test_a_quotient_that_the_true_sum_would_keep_finite_is_the_sums() -> None:
    drift = bad_op(
        "aten.add_", tensor(2048.0), tensor(1.0), kind="drift", error=0.5, pos_inf=0, nan=0,
        reached_loss=False, consumers=("div",),
    )  # fmt: skip
    quotient = bad_op("aten.div", tensor(6e4), tensor(0.5), id=1, fp32_max=1e5, line="train.py:19")
    made = evidence(run(BROKEN, drift, quotient))
    assert causes(diagnose(made)) == ["half_accumulation_stagnation"]
    far = replace(quotient, fp32_max=1e6)  # with the true sum it would be 5e5
    assert status("elementwise_overflow", evidence(run(BROKEN, drift, far))) is Status.FOUND


def test_a_sum_that_is_off_after_an_overflow_is_not_the_cause() -> None:
    overflow = bad_op("aten.pow", tensor(900.0), id=0, line="train.py:19")
    later = bad_op(
        "aten.sum", tensor(9.0), kind="coarse", id=1, error=0.06, pos_inf=0, nan=0,
        reached_loss=False,
    )  # fmt: skip
    assert causes(diagnose(evidence(run(BROKEN, overflow, later)))) == ["elementwise_overflow"]


def test_merged_labels_are_counted_and_latent_without_harm() -> None:
    said = answers(evidence(run(steps(), SITE)))["rounded_whole_numbers"]
    assert said.status is Status.LATENT
    assert "Of 4,000 different ones 3,024 are left" in said.reason
    harmed = answers(evidence(run(steps(FLAT), SITE), fp32_run()))["rounded_whole_numbers"]
    assert harmed.status is Status.FOUND
    assert harmed.fix.controls == (f"fp32_lines:{LINE}",)


def test_whole_numbers_that_stay_what_they_were_are_no_fault() -> None:
    for site in (
        replace(SITE, changed=0, merged=0, largest=255.0),
        replace(SITE, whole=False),
        replace(SITE, role="whole numbers"),  # nothing shows that they are used
        replace(SITE, role="activations"),
    ):
        assert status("rounded_whole_numbers", evidence(run(steps(), site))) is Status.PASSED


def test_whole_numbers_of_unknown_use_stand_behind_a_cause_that_is_seen() -> None:
    """They are the cause where no other is, or where the training does without harm once they are
    fp32; and none where that was tried in vain."""
    site = replace(SITE, role="whole numbers")
    baseline = run(steps(FLAT), site)
    control = f"fp32_lines:{LINE}"
    assert causes(diagnose(evidence(baseline))) == ["rounded_whole_numbers"]
    beside = log([ZERO, SCALE, BACKWARD, STEP, DIRECT_STEP, UPDATE])
    bypassed = diagnose(evidence(run(steps(FLAT), site, calls=beside)))
    assert causes(bypassed) == ["scaler_bypassed"]
    for losses, found in ((FALLING, Status.FOUND), (FLAT, Status.PASSED)):
        tried = evidence(baseline, **{control: run(steps(losses), control=control)})
        assert status("rounded_whole_numbers", tried) is found


def test_ids_read_out_of_a_mixed_table_lead_to_where_it_became_half() -> None:
    table = replace(SITE, whole=False, merged=0, role="data", line="data.py:15")
    read = OpUse("half_whole", "_to_copy", "", "train.py:56", 0, 330.0, 512.0)
    said = answers(evidence(run(steps(FLAT), table, read)))["rounded_whole_numbers"]
    assert (said.status, said.line) == (Status.FOUND, "data.py:15")


def test_ids_out_of_a_half_buffer_or_array_lead_to_where_they_became_half() -> None:
    read = OpUse("half_whole", "_to_copy", "", "train.py:40", 0, 330.0, 512.0)
    buffer = replace(SITE, kind="module", role="buffers", line="train.py:39")
    own = replace(SITE, role="data", whole=False, line="train.py:40")  # at the line that reads
    array = HalfSite("cast", "train.py:38", "numpy.float16", "fp16", role="data", calls=1)
    taken = HalfSite("loaded", "train.py:40", "torch.from_numpy", "fp16", calls=1)
    for sites, lines in (
        ([buffer], "train.py:39"),
        ([own], "train.py:40"),
        ([array, taken], "train.py:38,train.py:40"),  # no numbers of these are known
        ([array, taken, replace(taken, line="train.py:5")], ""),  # too many to tell
    ):
        said = answers(evidence(run(steps(FLAT), read, *sites)))["rounded_whole_numbers"]
        assert said.status is Status.FOUND
        assert said.fix.controls == ((f"fp32_lines:{lines}",) if lines else ())
        assert said.line == (lines or "train.py:40").partition(",")[0]
