"""The rules that acquit AMP: fp32 must fail too, at the same place and at the same time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ampscope.analysis.evidence import Evidence
from ampscope.diagnosis.findings import diagnose
from ampscope.observations import READ_LOSS, BadOp, Call, Observation, OpUse, ParameterGradient
from ampscope.rules.not_amp_divergence import divisors_of
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    LINE,
    NAN,
    OVERFLOWED,
    STEPS,
    WITHOUT_SCALER,
    answers,
    bad_op,
    but,
    causes,
    evidence,
    fp32_run,
    run,
    scan,
    search,
    status,
    steps,
    tensor,
)
from tests.helpers.evidence_of_ops import ACTIVATION, empty_loss, fully_masked_row
from tests.helpers.evidence_of_runs import bad_batch, bad_weights, diverging

DEAD = {"grad_nonfinite": 1000, "weight_nonfinite": 1000, "grad_norm": None}
NAN_STEPS = steps((NAN,) * STEPS, **OVERFLOWED)
ROW = OpUse("fully_masked_row", "_softmax", "attention", LINE, 0, 4.0, 32.0)
BY_FP32 = {
    "bad_initial_state": bad_weights,
    "bad_input_data": bad_batch,
    "empty_loss_reduction": empty_loss,
    "fully_masked_row": fully_masked_row,
    "not_amp_divergence": diverging,
}


@pytest.mark.parametrize("cause", BY_FP32)
def test_nobody_is_acquitted_without_the_control(cause: str) -> None:
    said = answers(evidence(BY_FP32[cause]().baseline, fp32=None))[cause]
    assert said.status is Status.INCONCLUSIVE
    assert "fp32" in said.reason


@pytest.mark.parametrize("cause", BY_FP32)
def test_a_sound_control_leaves_half_precision_to_blame(cause: str) -> None:
    assert status(cause, evidence(BY_FP32[cause]().baseline)) is Status.PASSED


def breaks_at_once(bf16: bool = True, later: int = 0) -> Evidence:
    """A recurrence that overflows half within the first step; fp32 from step ``later``."""
    bad = {"grad_nonfinite": 16, "grad_norm": None, "weight_nonfinite": 16}
    broken = but(steps((*FLAT[:later], *(NAN,) * (STEPS - later))), range(later, STEPS), **bad)
    own = run(steps((NAN,) * STEPS, **OVERFLOWED), bad_op("aten.mm", fp32_finite=False))
    controls = {"bf16": run(broken, control="bf16")} if bf16 else {}
    return evidence(own, fp32_run(broken), **controls)


def test_where_every_control_breaks_amp_is_innocent() -> None:
    diagnosis = diagnose(breaks_at_once())
    assert causes(diagnosis) == ["not_amp_divergence"]
    assert "the fp32 and bf16 controls fail too, in fp32 at step 0" in (
        diagnosis.findings[0].verdict.reason
    )


@pytest.mark.parametrize(
    ("later", "expected", "is_tried"),
    [(0, 0.5, False), (2, 0.5, True), (2, None, True), (2, 0.001, False)],
    ids=["first_step", "long", "unknown", "short"],
)
def test_a_lower_rate_is_tried_only_where_steps_could_have_led_there(
    later: int, expected: float | None, is_tried: bool
) -> None:
    bad = {"grad_nonfinite": 16, "grad_norm": None, "weight_nonfinite": 16}
    made = steps((*FLAT[:later], *(NAN,) * (STEPS - later)), expected_change=expected)
    made = [replace(a, update_norm=None) for a in but(made, range(later, STEPS), **bad)]
    skipped = but(
        steps((*FLAT[:later], *(NAN,) * (STEPS - later))), range(later, STEPS), **OVERFLOWED
    )
    own = run(skipped, bad_op("aten.mm", fp32_finite=False, step=later))
    (found,) = diagnose(evidence(own, fp32_run(made), bf16=run(made, control="bf16"))).findings
    assert found.cause == "not_amp_divergence"
    assert bool(found.verdict.fix.controls) is is_tried


def test_an_fp32_control_that_breaks_much_later_acquits_nobody() -> None:
    assert "not_amp_divergence" not in causes(diagnose(breaks_at_once(later=9)))
    assert diagnose(breaks_at_once(bf16=False)).verdict == "inconclusive"


def test_a_weight_that_only_the_cast_made_infinite_is_no_bad_initial_state() -> None:
    weight = scan("start", "parameter", "head.weight", dtype="fp16", inf=1, max_abs=65504.0)
    sound = scan("start", "parameter", "head.weight", max_abs=70000.0)
    made = evidence(run(NAN_STEPS, weight), fp32_run(None, sound))
    assert status("bad_initial_state", made) is Status.PASSED


def test_weights_that_break_in_training_were_not_bad_before() -> None:
    late = scan("start", "parameter", "head.weight", nan=4, step=3)
    dead = fp32_run(steps((NAN,) * STEPS, **DEAD), late)
    assert status("bad_initial_state", evidence(run(NAN_STEPS, late), dead)) is Status.PASSED


def test_absurd_weights_count_as_bad() -> None:
    # What torch.empty finds in memory: finite, and of any magnitude.
    weight = scan("start", "parameter", "head.weight", max_abs=1e30)
    dead = fp32_run(steps((NAN,) * STEPS, **DEAD), weight)
    assert status("bad_initial_state", evidence(run(NAN_STEPS, weight), dead)) is Status.FOUND


def test_a_mask_of_infinities_that_nothing_trains_is_no_fault() -> None:
    mask = scan("start", "frozen", "causal_mask", inf=120)
    made = evidence(run(steps(), mask), fp32_run(None, mask))
    assert diagnose(made).verdict == "no_fault"


def test_a_mask_of_infinities_beside_an_overflow_is_not_to_blame() -> None:
    mask = scan("start", "frozen", "causal_mask", inf=120)
    made = evidence(run(NAN_STEPS, ACTIVATION, mask), fp32_run(None, mask))
    assert causes(diagnose(made)) == ["activation_overflow"]


def test_an_infinite_weight_of_a_frozen_part_breaks_fp32_at_once() -> None:
    weight = scan("start", "frozen", "backbone.weight", inf=1)
    dead = fp32_run(steps((NAN,) * STEPS, **DEAD), weight)
    assert causes(diagnose(evidence(run(NAN_STEPS, weight), dead))) == ["bad_initial_state"]


def test_a_bad_weight_that_nothing_uses_is_no_fault() -> None:
    unused = scan("start", "parameter", "old_head.weight", nan=4)
    assert diagnose(evidence(run(steps(), unused), fp32_run(None, unused))).verdict == "no_fault"


# The standard deviation of a constant column is 0, and 0 / 0 is NaN in every precision.
DIVIDED = bad_op(
    "aten.div", tensor(0.0), tensor(0.0, zeros=9), nan=9, pos_inf=0, dtype="fp32", module="",
    module_type="", tracked=False,
)  # fmt: skip


def test_a_value_that_preparing_the_data_made_is_bad_data() -> None:
    dead = fp32_run(steps((NAN,) * STEPS, **DEAD), DIVIDED)
    found = diagnose(evidence(run(NAN_STEPS, DIVIDED), dead))
    assert causes(found) == ["bad_input_data"]
    assert found.findings[0].verdict.line == LINE


@pytest.mark.parametrize(
    ("code", "divisors"),
    [
        ("gx = 2 * x / (W - 1) - 1", ["W - 1"]),
        ("return a / b.sum() + c.div(d)", ["b.sum()", "d"]),
        ("x /= n", ["n"]),
        ("y = torch.div(x, scale) / 2", ["scale"]),
        ("y = torch.div(x, other=scale)", ["scale"]),
        ("if x / y > 0:", ["y"]),
        ("returned = a / b", ["b"]),
        ("y = F.normalize(x)", []),
        ("y = f(x,", []),
    ],
)
def test_the_divisors_of_a_line(code: str, divisors: list[str]) -> None:
    assert sorted(divisors_of(code)) == sorted(divisors)


DIVISION = bad_op(
    "aten.div", tensor(0.0), tensor(0.0, zeros=1, shape=()), step=0, nan=4, pos_inf=0, total=4,
    dtype="fp32", module="", module_type="Flow", tracked=False, reached_loss=True,
    code="gx = 2 * x / (W - 1) - 1",
)  # fmt: skip
BY_A_NUMBER = replace(DIVISION, inputs=DIVISION.inputs[:1], scalars=(0.0,))
SPREAD = bad_op(
    "aten.std", tensor(3.0), step=0, nan=4, pos_inf=0, total=4, dtype="fp32", fp32_max=None,
    fp32_finite=False, reached_loss=True, code="z = z / z.std(0)",
)  # fmt: skip


@pytest.mark.parametrize(
    ("op", "said"), [(DIVISION, "W - 1"), (BY_A_NUMBER, "W - 1"), (SPREAD, "single element")]
)
def test_a_division_by_zero_is_said_with_its_divisor_and_no_learning_rate_is_run(
    op: BadOp, said: str
) -> None:
    dead = fp32_run(steps((NAN,) * STEPS, **DEAD), op)
    found = diagnose(evidence(run(NAN_STEPS, op), dead))
    assert causes(found) == ["not_amp_divergence"]
    verdict = found.findings[0].verdict
    assert said in verdict.reason
    assert (verdict.op, verdict.line) == (op.op, op.line)
    assert verdict.fix.controls == ()
    assert verdict.fix.kind == "rewrite_op"


@pytest.mark.parametrize(
    ("name", "code", "argument", "undefined"),
    [
        ("log", "loss = -torch.log(p[label]).mean()", "p[label]", (0.0, -1.0)),
        ("log", "loss = -(p + q).log().mean()", "p + q", (0.0, -1.0)),
        ("log2", "bits = p.log2()", "p", (0.0,)),
        ("log1p", "y = torch.log1p(input=x)", "x", (-1.0, -2.0)),
        ("logit", "y = torch.logit(p)", "p", (0.0, 1.0)),
        ("rsqrt", "y = x * torch.rsqrt(variance)", "variance", (0.0, -1.0)),
        ("atanh", "y = torch.atanh(x)", "x", (1.0, -1.0)),
    ],
)
def test_the_patch_of_a_function_is_for_its_argument(
    name: str, code: str, argument: str, undefined: tuple[float, ...]
) -> None:
    """Pasted in place of the argument, it gives the function a value where there was none, and
    changes none where there was."""
    op = bad_op(
        f"aten.{name}", tensor(0.5, zeros=1), step=0, nan=1, pos_inf=0, total=4, dtype="fp32",
        fp32_max=None, fp32_finite=False, reached_loss=True, code=code,
    )  # fmt: skip
    dead = fp32_run(steps((NAN,) * STEPS, **DEAD), op)
    (finding,) = diagnose(evidence(run(NAN_STEPS, op), dead)).findings
    assert finding.cause == "not_amp_divergence"
    verdict = finding.verdict
    assert argument in verdict.reason
    told = f"{verdict.reason}{verdict.fix.text}{verdict.fix.patch}"
    assert "denominator" not in told
    assert "divi" not in told
    kept = verdict.fix.patch.partition("  # in place of ")[0]
    given = {"p": [0.5], "q": 0.0, "label": 0, "x": 0.5, "variance": 0.5}
    for value in (*undefined, 0.5):
        given |= {"p": torch.tensor([value]), "x": torch.tensor(value)}
        given |= {"variance": torch.tensor(value)}
        safe = eval(kept, {"torch": torch}, given)
        assert torch.isfinite(getattr(torch, name)(safe)).all()
    assert safe.item() == 0.5


def test_an_argument_that_the_line_does_not_show_has_a_form() -> None:
    op = bad_op("aten.log", tensor(0.5, zeros=1), step=0, reached_loss=True, dtype="fp32",
                fp32_finite=False, code="loss = entropy(p)")  # fmt: skip
    dead = fp32_run(steps((NAN,) * STEPS, **DEAD), op)
    (finding,) = diagnose(evidence(run(NAN_STEPS, op), dead)).findings
    assert "denominator" not in finding.verdict.fix.patch
    assert "argument" in finding.verdict.fix.patch


def test_of_several_divisors_in_a_line_each_is_kept_from_zero() -> None:
    op = replace(BY_A_NUMBER, code="gx, gy = 2 * x / (W - 1) - 1, 2 * y / (H - 1) - 1")
    dead = fp32_run(steps((NAN,) * STEPS, **DEAD), op)
    (finding,) = diagnose(evidence(run(NAN_STEPS, op), dead)).findings
    assert set(finding.verdict.fix.patch.splitlines()) == {
        "(W - 1 or 1)  # in place of W - 1", "(H - 1 or 1)  # in place of H - 1",
    }  # fmt: skip


def test_a_division_that_the_fp32_control_alone_records_is_told_of_that_control() -> None:
    dead = fp32_run(steps((NAN,) * STEPS, **DEAD), DIVISION)
    found = diagnose(evidence(run(NAN_STEPS), dead, bf16=run(NAN_STEPS, control="bf16")))
    assert causes(found) == ["not_amp_divergence"]
    assert {measured.run for measured in found.findings[0].verdict.evidence} == {"fp32"}
    assert "True" not in [measured.value for measured in found.findings[0].verdict.evidence]


CTC = bad_op(
    "aten._ctc_loss", tensor(2.0), step=4, nan=0, pos_inf=8, dtype="fp32", reached_loss=True
)


@pytest.mark.parametrize("op", [DIVIDED, CTC])
def test_bad_data_that_the_script_leaves_out_in_every_precision_are_latent(op: BadOp) -> None:
    """A few batches, whose loss is not finite; nothing is wrong with either run."""
    read = Call(0, 0, "read", subject=READ_LOSS, line=LINE, note="0")
    calls = [replace(read, seq=100 + n, step=step) for n, step in enumerate((4, 9, 21))]
    both = [run(steps(), op, calls=calls, control=control) for control in ("as_is", "fp32")]
    found = diagnose(evidence(*both))
    assert (found.verdict, [f.cause for f in found.latent]) == ("no_fault", ["bad_input_data"])
    assert "left out 3 batches for their loss" in found.latent[0].verdict.reason


@pytest.mark.parametrize(
    ("name", "bad", "step", "latent"),
    [
        ("input 0 of GPT", {"nan": 1}, 4, ["bad_input_data"]),
        ("input 0 of GPT", {"nan": 1}, 5, []),  # of a batch that was trained on
        ("input 1 of GPT", {"inf": 120}, 4, []),  # a mask
    ],
)
def test_a_bad_sample_of_a_batch_that_is_left_out_is_latent(
    name: str, bad: dict[str, int], step: int, latent: list[str]
) -> None:
    sample = scan("batch", "batch", name, step=step, **bad)
    read = Call(100, 4, "read", subject=READ_LOSS, line=LINE, note="-1")
    both = [run(steps(), sample, calls=[read], control=control) for control in ("as_is", "fp32")]
    found = diagnose(evidence(*both))
    assert (found.verdict, [f.cause for f in found.latent]) == ("no_fault", latent)


def test_a_mean_over_no_label_is_no_bad_data() -> None:
    """Two batches of five have no label, and the script leaves out their loss of NaN."""
    mean = bad_op(
        "aten.mean", tensor(shape=(0,)), nan=1, pos_inf=0, dtype="fp32", module="", module_type="",
        tracked=False, reached_loss=False, reached_gradient=False,
    )  # fmt: skip
    read = Call(0, 0, "read", subject=READ_LOSS, line=LINE, note=str(mean.id))
    calls = [replace(read, seq=100 + n, step=step) for n, step in enumerate(range(0, 30, 2))]
    both = [run(steps(), mean, calls=calls, control=control) for control in ("as_is", "fp32")]
    assert diagnose(evidence(*both)).findings == ()


def test_a_bad_sample_that_is_only_evaluated_is_latent() -> None:
    """Validation data with a NaN, which the script leaves out of its mean: the same in fp32."""
    sample = scan("batch", "batch", "input 0 of GPT", nan=4, step=12)
    facts = {"eval_nonfinite": True, "eval_nan": 4}
    found = diagnose(evidence(run(steps(), sample, **facts), fp32_run(None, sample, **facts)))
    assert (found.verdict, [f.cause for f in found.latent]) == ("no_fault", ["bad_input_data"])


def test_a_mask_in_every_batch_is_not_what_overflowed() -> None:
    mask = [scan("batch", "batch", "input 1 of GPT", inf=120, step=n) for n in range(STEPS)]
    made = evidence(run(NAN_STEPS, ACTIVATION, *mask), fp32_run(None, *mask))
    assert causes(diagnose(made)) == ["activation_overflow"]


def test_a_mask_in_every_batch_is_not_what_diverged() -> None:
    mask = [scan("batch", "batch", "input 1 of GPT", inf=120, step=n) for n in range(STEPS)]
    usual = diverging()
    assert usual.fp32 is not None
    own, fp32 = usual.baseline.steps, usual.fp32.steps
    made = evidence(run(own, *mask), fp32_run(fp32, *mask))
    assert causes(diagnose(made)) == ["not_amp_divergence"]


def test_a_search_for_the_scale_does_not_hide_a_bad_batch() -> None:
    usual = bad_batch()
    assert usual.fp32 is not None
    own = search(usual.baseline.steps, 2.0**24, 3)
    made = evidence(run(own, *usual.baseline.scans), usual.fp32)
    assert causes(diagnose(made)) == ["bad_input_data"]


def test_a_target_that_no_module_sees_is_data_too() -> None:
    target = OpUse("nan_operand", "sub", "", LINE, 7)
    usual = bad_batch()
    assert usual.fp32 is not None
    made = evidence(run(usual.baseline.steps, target), fp32_run(usual.fp32.steps, target))
    found = diagnose(made)
    assert causes(found) == ["bad_input_data"]
    assert found.findings[0].verdict.line == LINE
    assert found.findings[0].verdict.step == 7


def test_a_count_that_is_zero_in_half_alone_is_no_empty_set() -> None:
    quotient = bad_op(
        "aten.div", tensor(1.0, shape=()), tensor(0.0, shape=(), zeros=1), nan=1, pos_inf=0, total=1
    )
    made = evidence(run(NAN_STEPS, quotient))
    assert status("empty_loss_reduction", made) is Status.PASSED


def test_the_mean_of_no_elements_and_a_quotient_by_no_tokens_are_empty() -> None:
    mean = bad_op("aten.mean", tensor(None, shape=(0,)), nan=1, pos_inf=0, total=1)
    quotient = bad_op(
        "aten.div", tensor(0.0, shape=()), tensor(0.0, shape=(), zeros=1), nan=1, pos_inf=0, total=1
    )
    for op in (mean, quotient):
        dead = fp32_run(steps((NAN,) * STEPS, **DEAD), replace(op, dtype="fp32"))
        assert causes(diagnose(evidence(run(NAN_STEPS, op), dead))) == ["empty_loss_reduction"]


def test_a_masked_row_that_does_no_harm_is_no_fault() -> None:
    assert diagnose(evidence(run(steps(), ROW), fp32_run(None, ROW))).verdict == "no_fault"


def test_a_row_that_is_masked_in_half_alone_is_the_mask_constants_doing() -> None:
    assert status("fully_masked_row", evidence(run(NAN_STEPS, ROW), fp32_run(None))) is (
        Status.PASSED
    )


def test_a_harmless_masked_row_from_the_start_is_not_what_diverged_later() -> None:
    usual = diverging()
    assert usual.fp32 is not None
    made = evidence(run(usual.baseline.steps, ROW), fp32_run(usual.fp32.steps, ROW))
    assert causes(diagnose(made)) == ["not_amp_divergence"]


def test_fp32_that_breaks_without_growing_did_not_diverge() -> None:
    once = but(steps([*FALLING[:7], *(NAN,) * 23]), range(7, STEPS), **DEAD)
    made = evidence(run(steps(FLAT)), fp32_run(once))
    assert status("not_amp_divergence", made) is Status.INCONCLUSIVE


@pytest.mark.parametrize(("behind", "expected"), [(0, Status.PASSED), (20, Status.FOUND)])
def test_fp32_that_trains_on_after_the_batches_it_left_out_did_not_diverge(
    behind: int, expected: Status
) -> None:
    """Sparse labels: a mean over none is NaN in two batches of five, and the script leaves these
    out. Gradients grow tenfold from a small start. Where no step follows, they took the weights
    along."""
    at = [*range(0, STEPS, 3), *range(1, STEPS, 3), *[STEPS] * behind]
    read = Call(0, 0, "read", subject=READ_LOSS, line=LINE, note="-1")
    calls = [replace(read, seq=100 + n, step=step) for n, step in enumerate(at)]
    made = but(steps(), [0], grad_norm=0.01)
    both = [run(made, calls=calls, control=control) for control in ("as_is", "fp32")]
    assert status("not_amp_divergence", evidence(*both)) is expected


def test_a_critics_loss_is_no_growth_of_the_actors() -> None:
    made = steps([0.01 if n % 2 else 1.0 for n in range(STEPS - 1, -1, -1)])
    named = [replace(a, optimizer=f"optimizer{a.step % 2}") for a in made]
    broken = but(named, range(9, STEPS), **DEAD)
    innocent = evidence(run(steps(FLAT)), fp32_run(broken))
    assert status("not_amp_divergence", innocent) is Status.INCONCLUSIVE
    alone = evidence(run(steps(FLAT)), fp32_run(but(made, range(9, STEPS), **DEAD)))
    assert status("not_amp_divergence", alone) is Status.FOUND


def test_an_fp32_control_that_raised_alone_has_not_failed() -> None:
    raised = {"ended": "exception", "error_type": "AssertionError", "error_line": "train.py:9"}
    made = fp32_run(steps(**WITHOUT_SCALER)[:3], **raised)
    assert not evidence(run(steps()), made).fp32_fails
    assert evidence(run(steps()[:3], **raised), made).fp32_fails
    assert evidence(run(steps()), fp32_run(steps((NAN,) * STEPS, **DEAD), **raised)).fp32_fails


def test_bf16_that_breaks_alone_says_nothing_of_fp32() -> None:
    assert status("not_amp_divergence", evidence(run(NAN_STEPS), bf16=run(NAN_STEPS))) is (
        Status.PASSED
    )


def test_half_precision_that_breaks_long_before_fp32_grows_is_to_blame() -> None:
    # fp16 is NaN from step 0 at one op; fp32 learns for ten steps and grows only then.
    late = [*FALLING[:10], *(10.0**n for n in range(1, 11)), *(NAN,) * 10]
    fp32 = fp32_run(but(steps(late), range(20, STEPS), **DEAD))
    assert causes(diagnose(evidence(run(NAN_STEPS, ACTIVATION), fp32)))[0] == "activation_overflow"


CHANCE = (1.39, 40.0, *(19.0,) * 28)  # cross entropy over four classes; 1.39 is guessing


def test_a_loss_that_ends_finite_far_above_its_start_is_no_matter_of_amp() -> None:
    made = steps(CHANCE, grad_norm=1.0, update_norm=15.0, lr=1.0)
    found = diagnose(evidence(run(made), fp32_run(made))).findings
    assert [f.cause for f in found] == ["not_amp_divergence"]
    assert "13.7 times its start" in found[0].verdict.reason


@pytest.mark.parametrize(
    ("losses", "facts"),
    [
        # returns grow: each step goes for a small part of the loss
        ([1.0 + 0.5 * n for n in range(30)], {"grad_norm": 1.0, "update_norm": 0.2}),
        # the steps were too long at first, and the loss came back
        ((1.4, 24.0, 14.0, *(1.2,) * 27), {"grad_norm": 1.0, "update_norm": 15.0}),
        # a policy's loss lies around zero
        ((0.01, *(0.9,) * 29), {"grad_norm": 1.0, "update_norm": 5.0}),
        # a critic's loss falls below zero
        ([-10.0 * n for n in range(30)], {"grad_norm": 1.0, "update_norm": 5.0}),
    ],
)
def test_a_loss_that_rises_for_the_task_or_comes_back_is_no_divergence(
    losses: list[float], facts: dict[str, float]
) -> None:
    made = steps(losses, **facts)
    assert diagnose(evidence(run(made), fp32_run(made))).findings == ()


OVERFLOW_IN_FP32 = bad_op(
    "aten.addmm", id=3, step=20, dtype="fp32", module="blocks.7", line="train.py:31",
    reached_loss=True, fp32_finite=False,
)  # fmt: skip
LOST_GRADIENT = ParameterGradient(20, "optimizer0", "head.weight", 2, 8, 0, 8, None)
FARTHEST = [
    scan("end", "parameter", "stem.weight", change=2.0),
    scan("end", "parameter", "neck.weight", change=4e5),
]


@pytest.mark.parametrize(
    ("seen", "module", "words"),
    [
        ([OVERFLOW_IN_FP32, LOST_GRADIENT], "blocks.7", "aten.addmm gives the first value"),
        ([LOST_GRADIENT, *FARTHEST], "head", "the gradient of head.weight is the first"),
        (FARTHEST, "neck", "neck.weight moves farthest, by 4e+05 times its first norm"),
        ([], None, "No record of the fp32 control tells in which module it begins."),
    ],
)
def test_where_fp32_diverges_is_said_as_far_as_it_is_known(
    seen: list[Observation], module: str | None, words: str
) -> None:
    usual = diverging()
    assert usual.fp32 is not None
    made = evidence(usual.baseline, fp32_run(usual.fp32.steps, *seen))
    (finding,) = diagnose(made).findings
    assert (finding.cause, finding.verdict.module) == ("not_amp_divergence", module)
    assert words in finding.verdict.reason
    assert "grown 10-fold at step 1 for the first time" in finding.verdict.reason


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((0.0, 250.0, 500.0, 400.0, 0.0), "the learning rate is up to 500."),
        ((0.5,) * 5, "the learning rate is 0.5."),
        ((math.nan,) * 5, "the learning rate is not known."),
    ],
)
def test_of_a_schedule_the_highest_learning_rate_up_to_the_failure_is_said(
    rates: tuple[float, ...], said: str
) -> None:
    usual = diverging()
    assert usual.fp32 is not None
    made = usual.fp32.steps
    scheduled = [replace(a, lr=lr) for a, lr in zip(made, (*rates, *[9e9] * STEPS), strict=False)]
    broken = [replace(a, loss=NAN) if a.step == 4 else a for a in scheduled]
    (finding,) = diagnose(evidence(usual.baseline, fp32_run(broken))).findings
    assert said in finding.verdict.reason


@pytest.mark.parametrize(
    ("share", "controls"),
    [
        (0.5, ("lr:0.1", "lr:0.01", "lr:0.001")),
        (30.0, ("lr:0.1", "lr:0.01", "lr:0.001")),
        # At the highest rate, ten times the first one, the first step would take off 3,000 losses.
        (300.0, ("lr:0.001", "lr:0.0001", "lr:1e-05")),
    ],
)
def test_learning_rates_that_would_overshoot_as_well_are_not_run(
    share: float, controls: tuple[str, ...]
) -> None:
    usual = diverging()
    assert usual.fp32 is not None
    rates = (0.0, 0.1, 1.0 if share > 100 else 0.1)
    loss = usual.fp32.steps[1].loss or 0.0
    warmed = [
        replace(a, lr=rates[min(a.step, 2)], expected_change=-share * loss if a.step == 1 else None)
        for a in usual.fp32.steps
    ]
    warmed = [replace(a, expected_change=0.0) if a.step == 0 else a for a in warmed]
    (finding,) = diagnose(evidence(usual.baseline, fp32_run(warmed))).findings
    assert finding.verdict.fix.controls == controls
    assert f'group["lr"] *= {controls[0].partition(":")[2]}' in finding.verdict.fix.patch


def test_a_divergence_that_stays_finite_has_the_step_at_which_it_left_its_range() -> None:
    losses = (1.0, 1.1, 3.0, 12.0, *(4000.0,) * 26)
    long = {"expected_change": -1e5, **WITHOUT_SCALER}
    made = evidence(run(steps(losses, **long)), fp32_run(steps(losses, **long)))
    (finding,) = diagnose(made).findings
    assert (finding.cause, finding.verdict.step) == ("not_amp_divergence", 3)


@pytest.mark.parametrize(
    ("unclipped_norm", "expected"),
    [(None, []), (1.0, []), (2000.0, ["not_amp_divergence"]), (math.inf, [])],
)
def test_a_clip_does_not_make_a_step_short(
    unclipped_norm: float | None, expected: list[str]
) -> None:
    """A momentum above 1 lengthens each step, and a clip to 1 keeps the gradients as they are: the
    loss rises by its slope, which is the gradient's norm before the clip."""
    losses = [1.0 * 1.6**n for n in range(STEPS)]
    facts = {"grad_norm": 1.0, "unclipped_norm": unclipped_norm, **WITHOUT_SCALER}
    made = [
        replace(a, update_norm=0.01 * abs(loss))
        for a, loss in zip(steps(losses, **facts), losses, strict=True)
    ]
    assert causes(diagnose(evidence(run(made), fp32_run(made)))) == expected
