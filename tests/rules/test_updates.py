"""What half precision does to gradients and updates: rules that stand close to each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.symptoms import Symptom
from ampscope.diagnosis.findings import diagnose
from ampscope.observations import Call, HalfSite, OptimizerStep
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    FP32_LOOP,
    INF,
    NAN,
    SCALED_LOOP,
    STEPS,
    WITHOUT_SCALER,
    answers,
    bad_op,
    causes,
    evidence,
    fp32_run,
    log,
    run,
    scan,
    search,
    status,
    steps,
    tensor,
)
from tests.helpers.evidence_of_ops import silent_square
from tests.helpers.evidence_of_runs import adam_in_half, gains_of_one, nothing_arrives

UPDATES = {
    "gradient_underflow": nothing_arrives,
    "optimizer_state_range": adam_in_half,
    "small_update_lost": gains_of_one,
}
HALF: dict[str, Any] = {
    "weight_dtypes": "fp16",
    "grad_dtypes": "fp16",
    "state_dtypes": "fp16",
    **WITHOUT_SCALER,
}


@pytest.mark.parametrize("cause", UPDATES)
def test_without_the_fp32_control_nothing_is_concluded(cause: str) -> None:
    said = answers(evidence(UPDATES[cause]().baseline, fp32=None))[cause]
    assert said.status is Status.INCONCLUSIVE
    assert "fp32" in said.reason


def zeros(own: int, in_fp32: int, losses: tuple[float, ...] = FLAT) -> Evidence:
    """Of 1,000 gradient entries, so many are zero as it is and in fp32."""
    fp32 = fp32_run(steps(FALLING, grad_zero=in_fp32))
    return evidence(run(steps(losses, grad_zero=own, **WITHOUT_SCALER)), fp32)


def test_zeros_that_fp32_has_too_are_structural() -> None:
    # Dead units: half of all gradients are zero in either precision.
    assert status("gradient_underflow", zeros(500, 500)) is Status.PASSED


def test_zeros_of_bf16_are_rounding_and_no_underflow() -> None:
    made = steps(FLAT, grad_zero=610, **WITHOUT_SCALER)
    fp32 = fp32_run(steps(FALLING, grad_zero=0))
    for autocast, model, gaps, expected in (
        ("fp16", "", (), Status.FOUND),
        ("bf16", "", (), Status.NOT_APPLICABLE),
        ("", "bf16", (), Status.NOT_APPLICABLE),
        ("bf16", "fp16", (), Status.FOUND),
        ("bf16", "", ("rnn",), Status.FOUND),  # torch's cuDNN wrapper casts to fp16
    ):
        view = run(made, uses_autocast=autocast, uses_half_model=model, gaps=gaps)
        assert status("gradient_underflow", evidence(view, fp32)) is expected


def test_what_is_saved_as_zero_is_lost_before_a_gradient() -> None:
    """No loss scale reaches activations that become half for the backward pass alone."""
    saved = HalfSite("saved", "train.py:17", "Tensor.half", "fp16", "saved activations",
                     calls=9, elements=1000, zeroed=400)  # fmt: skip
    fp32 = fp32_run(steps(FALLING, grad_zero=0))
    own = run(steps(FLAT, grad_zero=900, **WITHOUT_SCALER), saved)
    said = answers(evidence(own, fp32))["gradient_underflow"]
    assert said.status is Status.PASSED
    assert "400 of 1,000 activations that line train.py:17 makes" in said.reason
    own = run(steps(FLAT, grad_zero=900, **WITHOUT_SCALER),
              replace(saved, kind="function", role="activations"))  # fmt: skip
    assert status("gradient_underflow", evidence(own, fp32)) is Status.PASSED
    harmless = run(steps(FLAT, grad_zero=900, **WITHOUT_SCALER), replace(saved, zeroed=9))
    assert status("gradient_underflow", evidence(harmless, fp32)) is Status.FOUND


def test_lost_gradients_that_cost_nothing_are_latent_and_no_fault() -> None:
    diagnosis = diagnose(zeros(120, 0, FALLING))
    assert diagnosis.verdict == "no_fault"
    assert [f.cause for f in diagnosis.latent] == ["gradient_underflow"]
    assert "12.0% of the gradient entries" in diagnosis.latent[0].verdict.reason
    assert status("gradient_underflow", zeros(40, 0, FALLING)) is Status.PASSED


@pytest.mark.parametrize(
    ("own", "in_fp32", "losses", "scaled", "says"),
    [
        (1.0, 0.0, FALLING, False, Status.FOUND),  # an adversary that gets no direction at all
        (0.2, 0.1, FALLING, False, Status.LATENT),
        (0.4, 0.1, FLAT, False, Status.FOUND),
        (0.9, 0.9, FLAT, False, Status.PASSED),  # dead units
        (1.0, 0.0, FALLING, True, Status.PASSED),  # of a scaled loss: the scale's own rules judge
    ],
)
def test_gradients_that_the_script_asks_for_are_compared_with_those_of_fp32(
    own: float, in_fp32: float, losses: tuple[float, ...], scaled: bool, says: Status
) -> None:
    asked = Call(0, 0, "grad", scaled=scaled, line="train.py:50")
    here, there = replace(asked, value=own), replace(asked, value=in_fp32)
    views = (
        run(steps(losses), calls=log((here, *SCALED_LOOP), losses)),
        run(fp32_run().steps, calls=log((there, *FP32_LOOP)), control="fp32"),
    )
    said = answers(evidence(*views))["gradient_underflow"]
    assert said.status is says
    if says is Status.FOUND:
        assert said.line == "train.py:50"


@pytest.mark.parametrize(
    ("facts", "losses", "says"),
    [
        ({"zeroed": 900}, FALLING, Status.LATENT),  # a log's, for example
        ({"zeroed": 900}, FLAT, Status.FOUND),
        ({"zeroed": 200}, FLAT, Status.FOUND),
        ({"zeroed": 10}, FLAT, Status.PASSED),
        ({"zeroed": 900, "role": "activations"}, FLAT, Status.PASSED),
        ({"zeroed": 900, "kind": "autocast"}, FLAT, Status.PASSED),  # backward's own: in the step
    ],
)
def test_gradients_that_a_cast_of_the_script_makes_zero(
    facts: dict[str, Any], losses: tuple[float, ...], says: Status
) -> None:
    """In its own optimizer or a hook: the gradients at the step are there."""
    cast = HalfSite("cast", "train.py:61", "Tensor.half", "fp16", "gradients", elements=1000)
    said = answers(evidence(run(steps(losses), replace(cast, **facts))))["gradient_underflow"]
    assert said.status is says
    if says is Status.FOUND:
        assert (said.line, said.fix.kind) == ("train.py:61", "drop_cast")


@pytest.mark.parametrize(("autocast", "line"), [("", "train.py:61"), ("fp16", "train.py:2")])
def test_zeros_of_a_training_in_fp32_are_its_own_cast_s(autocast: str, line: str) -> None:
    """A buffer of the script's in half, out of which the step gets its gradients."""
    cast = HalfSite("cast", "train.py:61", "Tensor.to", "fp16", elements=1000, zeroed=900)
    made = steps(FLAT, grad_total=1000, grad_zero=900, **WITHOUT_SCALER)
    baseline = run(made, cast, uses_autocast=autocast)
    said = answers(evidence(baseline))["gradient_underflow"]
    assert (said.status, said.line) == (Status.FOUND, line)


@pytest.mark.parametrize(("own", "says"), [(610, Status.FOUND), (10, Status.PASSED)])
def test_a_loss_that_stays_behind_needs_lost_gradients_to_be_underflow(
    own: int, says: Status
) -> None:
    # Open-Rig3R#35 at a loss of 1e-5: 61 % of the entries are zero, and learning is slow.
    assert status("gradient_underflow", zeros(own, 0)) is says


def test_a_low_scale_is_raised_and_a_missing_scaler_is_added() -> None:
    without, low = (diagnose(nothing_arrives(scaler=s)).findings[0].verdict for s in (False, True))
    assert (without.fix.kind, low.fix.kind) == ("add_scaler", "change_scale")


def test_a_scale_that_came_down_from_an_overflow_is_not_to_be_raised() -> None:
    """The scaler left three steps out, and the gradients of the fourth were counted."""
    searched = search(steps(FALLING, grad_zero=120), 2.0**20, 3)
    made = evidence(run(searched), fp32_run(steps(FALLING, grad_zero=0)))
    (found,) = diagnose(made).latent
    assert (found.cause, found.verdict.fix.kind) == ("gradient_underflow", "use_bf16")
    old = Evidence(made.runs, "cuda", emulates_bf16=True)  # of a GPU without bf16
    (there,) = diagnose(old).latent
    assert (there.verdict.fix.kind, there.verdict.fix.controls) == ("rewrite_op", ())
    assert "bf16" not in there.verdict.fix.text + there.verdict.fix.patch
    assert f"at a loss scale of {searched[3].scale:,.6g}" in found.verdict.reason
    assert found.verdict.evidence[0].step == searched[3].step


def test_a_bias_whose_gradient_is_noise_in_fp32_has_lost_nothing() -> None:
    usual = nothing_arrives()
    assert usual.fp32 is not None
    bias = replace(usual.baseline.gradients[0], name="net.0.bias")
    noise = replace(usual.fp32.gradients[0], name="net.0.bias", norm=1e-9)
    made = evidence(run(steps(), bias), fp32_run(None, *usual.fp32.gradients, noise))
    assert status("gradient_underflow", made) is Status.PASSED


def test_a_layer_that_gets_nothing_is_named_though_the_rest_learns() -> None:
    usual = nothing_arrives()
    assert usual.fp32 is not None
    made = evidence(run(steps(), *usual.baseline.gradients), fp32_run(None, *usual.fp32.gradients))
    assert answers(made)["gradient_underflow"].module == "net.0"


def test_zeros_of_a_skipped_step_are_not_lost() -> None:
    # A clip by hand divides by the infinite norm of a step that is then skipped.
    usual = nothing_arrives()
    assert usual.fp32 is not None
    made = evidence(
        run(search(steps(), 65536.0, 1), *usual.baseline.gradients),
        fp32_run(None, *usual.fp32.gradients),
    )
    assert status("gradient_underflow", made) is Status.PASSED


def test_zeros_behind_an_overflow_inside_are_not_underflow() -> None:
    assert status("gradient_underflow", silent_square()) is Status.INCONCLUSIVE


def test_fp32_alone_has_no_underflow_in_half() -> None:
    made = evidence(run(steps(FLAT, grad_zero=990), uses_autocast=""))
    assert status("gradient_underflow", made) is Status.NOT_APPLICABLE


def test_gradients_behind_a_loss_that_is_nan_are_not_discussed() -> None:
    # An op made the loss NaN in the last steps; the first had zero gradients already.
    losses = (*FLAT[:20], *(NAN,) * 10)
    late = bad_op("aten.addmm", fp32_max=66246.0, step=20, count=10)
    made = evidence(run(steps(losses, grad_zero=1000), late))
    assert status("gradient_underflow", made) is Status.PASSED


def test_weights_in_fp32_that_stand_still_are_not_lost_updates() -> None:
    made = evidence(run(steps(FLAT, moved_share=0.0)))
    assert status("small_update_lost", made) is Status.PASSED


def test_weights_without_gradients_have_no_updates_to_lose() -> None:
    made = evidence(run(steps(FLAT, moved_share=0.0, grad_norm=0.0, grad_zero=1000, **HALF)))
    assert status("small_update_lost", made) is Status.PASSED


def test_weights_that_fp32_does_not_move_either_are_not_lost_updates() -> None:
    still = fp32_run(steps(moved_share=0.0))
    made = evidence(run(steps(moved_share=0.0, **HALF)), still)
    assert status("small_update_lost", made) is Status.PASSED


WAY = (0.02, -0.04, 0.01)  # of the same weights in fp32
SLOWER = tuple(1.5 - 0.8 * (1.5 - loss) for loss in FALLING)


def rounded_by_the_script(since: float, held_in: str = "bf16", kept: float = 0.2) -> Evidence:
    """Steps move all fp32 weights, and the script rounds them back before the next one."""
    end = scan("end", "parameter", "w", displacement=tuple(kept * x for x in WAY))
    fp32 = fp32_run(steps(moved_since=1.0), replace(end, displacement=WAY))
    return evidence(run(steps(moved_since=since, held_in=held_in), end), fp32)


def test_fp32_weights_that_the_script_rounds_after_each_step_lose_their_updates() -> None:
    found = diagnose(rounded_by_the_script(0.1)).findings[0]
    assert found.cause == "small_update_lost"
    assert "in bf16, to which the script rounds the weights" in found.verdict.reason


@pytest.mark.parametrize(
    "made",
    [
        rounded_by_the_script(0.9),
        rounded_by_the_script(0.1, held_in=""),  # put back by the script, as after a trial step
        rounded_by_the_script(0.1, kept=0.99),  # stochastic rounding
    ],
)
def test_fp32_weights_that_move_or_come_as_far_have_lost_nothing(made: Evidence) -> None:
    assert status("small_update_lost", made) is Status.PASSED


def test_masters_of_half_weights_that_zero_gradients_leave_alone_are_not_rounded() -> None:
    """Where a clip by an infinite norm multiplied every gradient by zero, the fp32 masters still
    hold what the half weights gave them: no update was there to be lost."""
    still = steps(moved_share=0.0, moved_since=0.0, held_in="fp16", grad_norm=0.0)
    still = [replace(a, grad_zero=a.grad_total, grad_max=0.0) for a in still]
    own = scan("end", "parameter", "w", displacement=(0.0, 0.0, 0.0))
    fp32 = fp32_run(steps(moved_since=1.0), replace(own, displacement=WAY))
    assert status("small_update_lost", evidence(run(still, own), fp32)) is Status.PASSED


LAGGING = [FALLING[0] - 0.88 * (FALLING[0] - loss) for loss in FALLING]
SCATTERED = [loss + 0.03 * (1 + 6 * (-1) ** n) for n, loss in enumerate(FALLING)]


@pytest.mark.parametrize(
    ("losses", "kept", "says"),
    [
        (SLOWER, 0.7, Status.FOUND),
        (tuple(LAGGING), 0.7, Status.FOUND),  # 12 % of fp32's progress, at each of the batches
        (tuple(SCATTERED), 0.7, Status.LATENT),  # 3 % of it, within what batches scatter
        (FALLING, 0.7, Status.LATENT),  # 30 % of the way is lost, and the loss does not mind
        (SLOWER, 0.95, Status.PASSED),
    ],
)
def test_updates_of_which_a_part_is_lost_count_where_learning_suffers(
    losses: tuple[float, ...], kept: float, says: Status
) -> None:
    own = scan("end", "parameter", "w", dtype="fp16", displacement=tuple(kept * x for x in WAY))
    fp32 = fp32_run(None, replace(own, dtype="fp32", displacement=WAY))
    made = evidence(run(steps(losses, moved_share=0.4, **HALF), own), fp32)
    assert status("small_update_lost", made) is says


@pytest.mark.parametrize(
    ("still", "says"), [(0.75, Status.FOUND), (0.1, Status.LATENT), (None, Status.LATENT)]
)
def test_most_weights_that_stand_still_to_the_end_are_a_fault_though_the_loss_does_not_mind(
    still: float | None, says: Status
) -> None:
    """The few that move carry the loss so far. Three quarters of the others are not trained."""
    own = scan("end", "parameter", "w", displacement=tuple(0.85 * x for x in WAY), still=still)
    fp32 = fp32_run(steps(moved_since=1.0), replace(own, displacement=WAY, still=0.0))
    made = evidence(run(steps(moved_since=0.3, held_in="bf16"), own), fp32)
    assert status("small_update_lost", made) is says


def average(moved: float, dtype: str = "bf16", wide: float = 0.86) -> Evidence:
    """sd_dreambooth_extension#1415: fp32's average moves by 0.43 (0.5 to 0.93)."""
    own = scan("end", "frozen", "ema.weight", dtype=dtype, change=moved)
    return evidence(run(steps(), own), fp32_run(None, replace(own, dtype="fp32", change=wide)))


def test_an_average_that_stands_still_in_half_is_a_lost_update() -> None:
    found = diagnose(average(0.0)).findings[0]
    assert found.cause == "small_update_lost"
    assert found.verdict.module == "ema"


@pytest.mark.parametrize(
    "made",
    [
        average(0.8),
        average(0.0, "fp32"),
        # improved-diffusion: fp16 copies of flat fp32 weights, after 16 small steps.
        average(1e-5, "fp16", 4e-5),
    ],
)
def test_an_average_that_moves_or_is_kept_in_fp32_is_not(made: Evidence) -> None:
    assert status("small_update_lost", made) is Status.PASSED


@pytest.mark.parametrize(("parameter", "cause"), [
    (True, "small_update_lost"), (False, "half_accumulation_stagnation"),
])  # fmt: skip
def test_a_stalled_sum_of_weights_is_an_average_and_any_other_a_sum(
    parameter: bool, cause: str
) -> None:
    target = tensor(1.0, is_parameter=parameter)
    stagnated = bad_op("aten.add_", target, kind="stall", error=1.0, reached_loss=False, pos_inf=0)
    assert causes(diagnose(evidence(run(steps(), stagnated)))) == [cause]


@pytest.mark.parametrize(("change", "says"), [(0.099, Status.PASSED), (0.01, Status.FOUND)])
def test_stalls_of_an_average_that_comes_as_far_as_in_fp32_lose_nothing(
    change: float, says: Status
) -> None:
    # Kahan's compensation adds nothing at most steps, and the whole at some.
    target = tensor(is_parameter=True)
    stagnated = bad_op("aten.add_", target, kind="stall", error=1.0, reached_loss=False, pos_inf=0)
    own = scan("end", "frozen", "average.weight", dtype="bf16", change=change)
    full = scan("end", "frozen", "average.weight", change=0.1)
    made = evidence(run(steps(), stagnated, own), fp32_run(None, full))
    assert status("small_update_lost", made) is says


@pytest.mark.parametrize(("way", "says"), [(0.99, Status.PASSED), (0.6, Status.FOUND)])
def test_an_average_that_follows_and_then_stands_still_loses_updates(
    way: float, says: Status
) -> None:
    # Weights that move far take their average along until the distance is below half a spacing.
    target = tensor(is_parameter=True)
    stagnated = bad_op("aten.lerp_", target, kind="stall", error=1.0, reached_loss=False, pos_inf=0)
    places = (0.02, -0.04, 0.01)
    moved = tuple(way * d for d in places)
    own = scan("end", "frozen", "average", dtype="bf16", change=0.1, displacement=moved)
    full = scan("end", "frozen", "average", change=0.1, displacement=places)
    made = evidence(run(steps(), stagnated, own), fp32_run(None, full))
    assert status("small_update_lost", made) is says


def two_optimizers(skipped: int, **clipped: float) -> list[OptimizerStep]:
    """Iterations of an embedding's optimizer, which moves few weights, and of one for the rest,
    whose first ``skipped`` steps the scaler left out."""
    made = []
    for number in range(STEPS):
        rare = number % 2 == 0
        (step,) = steps(
            FLAT[:1],
            optimizer=f"optimizer{number % 2}",
            moved_share=0.08 if rare else 1.0,
            grad_zero=900 if rare else 0,
        )
        step = replace(step, step=number)
        if number // 2 < skipped:
            changes = clipped if rare else {"skipped": True, "grad_nonfinite": 10}
            step = replace(step, **changes)
        made.append(step)
    return made


def test_an_embedding_that_moves_few_weights_is_no_loss_when_other_steps_are_skipped() -> None:
    made = evidence(run(two_optimizers(skipped=4)), fp32_run(two_optimizers(skipped=0)))
    assert Symptom.FROZEN not in made.symptoms


def test_zeros_that_a_clip_by_an_infinite_norm_made_are_no_underflow() -> None:
    # The overflow of one optimizer's gradients makes the common norm infinite; the other's become
    # zero, are finite, and its step is taken.
    own = two_optimizers(4, grad_zero=1000, grad_norm=0.0, unclipped_norm=INF, moved_share=0.0)
    made = evidence(run(own), fp32_run(two_optimizers(skipped=0)))
    assert status("gradient_underflow", made) is Status.PASSED


def fine_tuned(kept: float, losses: tuple[float, ...] | None = None) -> Evidence:
    """30 steps of pre-training in fp32, then the weights are cast to bf16 and another optimizer
    trains them, whose updates keep a share of fp32's descent. The way over the whole run is that
    of the pre-training."""
    own_losses = tuple(FALLING) if losses is None else losses

    def phases(later: tuple[float, ...], share: float, **facts: Any) -> list[OptimizerStep]:
        before = steps(FALLING, **WITHOUT_SCALER)
        after = steps(later, moved_share=share, expected_change=-0.01 * share, **facts)
        return before + [
            replace(a, step=a.step + len(before), optimizer="optimizer1", scaler="", scale=1.0)
            for a in after
        ]

    half = {"weight_dtypes": "bf16", "grad_dtypes": "bf16", "state_dtypes": "bf16"}
    places = tuple(0.1 * n for n in range(1, 65))
    start = scan("start", "frozen", "w")
    end = scan("end", "parameter", "w", displacement=places)
    return evidence(
        run(phases(own_losses, kept, **half), start, replace(end, dtype="bf16"), uses_autocast=""),
        fp32_run(phases(tuple(FALLING), 1.0), start, end),
    )


def test_what_a_fine_tuning_in_half_loses_is_not_hidden_by_the_training_before() -> None:
    stuck = tuple(FALLING[0] - 0.001 * n for n in range(STEPS))
    made = fine_tuned(0.1, stuck)
    assert Symptom.BEHIND in made.symptoms
    said = answers(made)["small_update_lost"]
    assert said.status is Status.FOUND
    assert "bf16" in said.reason
    assert {e.name: e.value for e in said.evidence}["way over the run, of fp32's"] == (
        pytest.approx(0.1)
    )


def test_a_fine_tuning_in_half_whose_steps_come_as_far_is_healthy() -> None:
    made = fine_tuned(0.95)
    assert not made.symptoms
    assert answers(made)["small_update_lost"].status is Status.PASSED
