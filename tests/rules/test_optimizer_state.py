"""Moments and epsilon of an optimizer that keeps its state in half precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ampscope.analysis.run_view import RunView
from ampscope.diagnosis.findings import diagnose
from ampscope.observations import HalfSite
from ampscope.rules.verdict import Measurement, Status
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    NAN,
    STEPS,
    WITHOUT_SCALER,
    answers,
    but,
    causes,
    evidence,
    fp32_run,
    run,
    status,
    steps,
)
from tests.helpers.evidence_of_runs import adam_in_half

HALF: dict[str, Any] = {
    "weight_dtypes": "fp16",
    "grad_dtypes": "fp16",
    "state_dtypes": "fp16",
    **WITHOUT_SCALER,
}


def test_state_in_fp32_has_the_range_of_fp32() -> None:
    made = evidence(run(but(steps(FLAT), [3], weight_nonfinite=9)))
    assert status("optimizer_state_range", made) is Status.NOT_APPLICABLE


def test_weights_that_follow_bad_gradients_are_not_the_optimizers_doing() -> None:
    dead = steps((NAN,) * STEPS, grad_nonfinite=9, weight_nonfinite=9, eps=1e-8, **HALF)
    assert status("optimizer_state_range", evidence(run(dead))) is Status.PASSED


@pytest.mark.parametrize("eps", [1e-8, 2.0**-25, 3e-8, 1e-7, 1e-4])
def test_an_eps_that_fp16_rounds_to_zero_is_named(eps: float) -> None:
    vanishes = bool(np.float16(eps) == 0)
    broken = but(steps(FLAT, **HALF, eps=eps), [0], weight_nonfinite=9)
    said = answers(evidence(run(broken)))["optimizer_state_range"]
    assert said.status is Status.FOUND
    assert ("is 0 in fp16" in said.reason) is vanishes


@pytest.mark.parametrize(("times", "says"), [(1000.0, Status.FOUND), (2.0, Status.PASSED)])
def test_steps_far_larger_than_those_of_fp32_show_a_lost_second_moment(
    times: float, says: Status
) -> None:
    # fp32 moves by 0.01 a step.
    made = evidence(run(steps((1.5, *(3818.0,) * 29), update_norm=0.01 * times, **HALF)))
    assert status("optimizer_state_range", made) is says


def test_moments_that_are_not_finite_are_found_though_the_loss_falls() -> None:
    made = evidence(run(but(steps(**HALF), [4], state_nonfinite=3)))
    assert causes(diagnose(made)) == ["optimizer_state_range"]
    assert answers(made)["optimizer_state_range"].step == 4


@pytest.mark.parametrize(("share", "says"), [(0.9, Status.FOUND), (0.2, Status.PASSED)])
def test_weights_stand_still_where_most_second_moments_vanished(share: float, says: Status) -> None:
    made = evidence(run(steps(FLAT, moved_share=0.1, state_zero_share=share, **HALF)))
    assert status("optimizer_state_range", made) is says


@pytest.mark.parametrize(
    ("fell", "says"), [(0.0, Status.LATENT), (0.02, Status.PASSED), (None, Status.PASSED)]
)
def test_moments_that_never_fall_are_latent(fell: float | None, says: Status) -> None:
    # bf16 has 8 bits: v * 0.999 is nearer to v than to the number below it.
    made = evidence(run(steps(**(HALF | {"state_dtypes": "bf16"}), state_fell_share=fell)))
    assert status("optimizer_state_range", made) is says
    assert diagnose(made).verdict == "no_fault"


def test_moments_of_a_few_steps_or_of_skipped_ones_show_nothing() -> None:
    few = evidence(run(steps(FALLING[:12], **HALF, state_fell_share=0.0)))
    assert status("optimizer_state_range", few) is Status.PASSED
    skipped = evidence(run(but(steps(**HALF, state_fell_share=0.0), range(15), skipped=True)))
    assert status("optimizer_state_range", skipped) is Status.PASSED


@pytest.mark.parametrize(
    ("done", "says"), [(0.0, Status.LATENT), (0.3, Status.LATENT), (0.9, Status.PASSED)]
)
def test_a_decay_that_rounds_back_is_latent_after_three_steps(done: float, says: Status) -> None:
    """The sum of the falls decides: a rounding that keeps the mean loses nothing."""
    falls = {"state_fell_share": 0.0, "state_decay": 0.999}
    falls |= {"state_fall_due": 10.0, "state_fall_done": 10.0 * done}
    half = HALF | {"state_dtypes": "bf16"}
    made = evidence(run(steps(FALLING[:3], **half, **falls)))
    assert status("optimizer_state_range", made) is says
    if says is Status.LATENT:
        said = answers(made)["optimizer_state_range"]
        assert f"{1 - done:.0%} of their decay was lost in 3 steps" in said.reason
        assert "bf16 rounds less than 0.002 of any number back" in said.reason


def test_a_decay_of_which_nothing_was_due_shows_nothing() -> None:
    """While moments grow from zero none of them has to fall."""
    falls = {"state_fell_share": 0.0, "state_decay": 0.999}
    falls |= {"state_fall_due": 0.1, "state_fall_done": 0.0}
    made = evidence(run(steps(**(HALF | {"state_dtypes": "bf16"}), **falls)))
    assert status("optimizer_state_range", made) is Status.PASSED


def test_half_state_in_a_healthy_run_is_no_fault() -> None:
    assert diagnose(evidence(run(steps(eps=1e-4, **HALF)))).verdict == "no_fault"


def test_the_dtype_the_eps_and_the_step_are_the_evidence() -> None:
    made = evidence(run(steps((1.5, *(3818.0,) * 29), update_norm=10.0, eps=1e-7, **HALF)))
    values = {m.name: m for m in answers(made)["optimizer_state_range"].evidence}
    assert values["dtype of the state"].value == "fp16"
    # The smallest fp16 number is 2^-24; fp32 moves by 0.01 a step, a thousandth of 10.
    assert values["eps"] == Measurement("eps", 1e-7, 2.0**-24, "as_is")
    assert values["update norm over fp32's"].value == pytest.approx(1000.0)


def test_an_optimizer_without_eps_has_none_in_the_evidence() -> None:
    made = evidence(run(but(steps(FLAT, **HALF), [0], weight_nonfinite=9)))
    assert "eps" not in {m.name for m in answers(made)["optimizer_state_range"].evidence}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"weight_nonfinite": 9}, "the weights are not finite after step 4"),
        ({"state_nonfinite": 9}, "its moments are not finite after step 4"),
    ],
)
def test_what_broke_and_when_is_said(facts: dict[str, int], words: str) -> None:
    made = evidence(run(but(steps(FLAT, **HALF), [4], **facts)))
    assert words in answers(made)["optimizer_state_range"].reason


def test_large_steps_and_dead_moments_are_told_apart() -> None:
    large = evidence(run(steps((1.5, *(3818.0,) * 29), update_norm=10.0, **HALF)))
    dead = evidence(run(steps(FLAT, moved_share=0.1, state_zero_share=0.9, **HALF)))
    assert "times those of fp32" in answers(large)["optimizer_state_range"].reason
    assert "90.0% of its second moments" in answers(dead)["optimizer_state_range"].reason


def test_large_steps_that_train_as_well_as_fp32_are_no_fault() -> None:
    assert diagnose(evidence(run(steps(update_norm=10.0, **HALF)))).verdict == "no_fault"


def test_fp32_that_fails_as_early_leaves_the_question_open() -> None:
    dead = fp32_run(steps((NAN,) * STEPS, grad_nonfinite=9, weight_nonfinite=9))
    made = evidence(adam_in_half().baseline, dead)
    assert status("optimizer_state_range", made) is Status.INCONCLUSIVE


@pytest.mark.parametrize(("norm", "says"), [(1.1, Status.FOUND), (40.0, Status.PASSED)])
def test_state_that_is_half_from_a_second_phase_on_is_compared_there(
    norm: float, says: Status
) -> None:
    """With the gradients that fp32 has at that step; runs that have parted tell nothing."""
    later = {"optimizer": "optimizer1", "grad_norm": 1.0}
    control = but(steps(**WITHOUT_SCALER), range(20, STEPS), **later)
    losses = (*FALLING[:21], *(3818.0,) * 9)
    made = but(steps(losses), range(20, STEPS), **{**later, "state_dtypes": "fp16"})
    made = but(made, [20], update_norm=50.0, grad_norm=norm)
    assert status("optimizer_state_range", evidence(run(made), fp32_run(control))) is says


def test_advice_is_of_the_optimizer_that_is_used() -> None:
    """SGD has no epsilon, and its patch makes no Adam."""
    adam = answers(adam_in_half())["optimizer_state_range"]
    assert "eps=1e-4" in adam.fix.text
    usual = adam_in_half().baseline
    made = [replace(a, eps=None) for a in usual.steps]
    sgd = run(made, uses_autocast="", uses_half_model="fp16", optimizers=("SGD",))
    said = answers(evidence(sgd))["optimizer_state_range"]
    assert said.status is Status.FOUND
    assert "The state of the optimizer (SGD) is fp16" in said.reason
    assert "Adam" not in said.fix.patch
    assert "eps" not in said.fix.text
    assert "eps:0.0001" not in said.fix.controls


def _resumed(losses: tuple[float, ...], leap: float, zero: float = 0.4, kind: str = "fp16") -> Any:
    """A step that follows a load in the middle of the run; usual steps move by 0.01."""
    facts = {"written_in": kind, "written_zero_share": zero, "update_norm": 0.01 * leap}
    return run(but(steps(losses, **WITHOUT_SCALER), [15], **facts))


JUMPS = (*(1.0,) * 16, *(5.0,) * 5, *(1.0,) * 9)


@pytest.mark.parametrize(
    ("losses", "leap", "zero", "kind", "says"),
    [
        (JUMPS, 50.0, 0.4, "fp16", Status.FOUND),
        ((1.0,) * 30, 50.0, 0.4, "fp16", Status.LATENT),  # the loss keeps its course
        (JUMPS, 1.2, 0.4, "fp16", Status.NOT_APPLICABLE),  # the update does
        (JUMPS, 50.0, 0.0, "bf16", Status.NOT_APPLICABLE),  # in range: another cause's
        (JUMPS, 50.0, 0.4, "", Status.NOT_APPLICABLE),  # zeros of the training's own
    ],
)
def test_moments_that_came_back_as_zeros(
    losses: tuple[float, ...], leap: float, zero: float, kind: str, says: Status
) -> None:
    """The control, whose state went the same way, cannot heal it."""
    made = evidence(_resumed(losses, leap, zero, kind), _resumed(losses, leap, zero, kind))
    assert status("optimizer_state_range", made) is says
    if says is Status.FOUND:
        assert causes(diagnose(made)) == ["optimizer_state_range"]
        found = answers(made)["optimizer_state_range"]
        values = {m.name: m.value for m in found.evidence}
        assert found.step == 15
        assert values["update norm over that of the steps before"] == pytest.approx(50.0)
        assert values["loss after it"] == 5.0


def test_a_process_that_only_resumes_is_compared_with_its_later_steps() -> None:
    losses = (1.0, *(5.0,) * 6, *(1.0,) * 33)
    facts = {"written_in": "fp16", "written_zero_share": 0.4, "update_norm": 0.5}
    made = run(but(steps(losses, **WITHOUT_SCALER), [0], **facts))
    found = answers(evidence(made, made))["optimizer_state_range"]
    assert found.status is Status.FOUND
    assert {m.name: m.value for m in found.evidence}["update norm over that of later steps"] == 50


def test_the_cast_of_the_moments_is_the_line() -> None:
    site = HalfSite("cast", "train.py:49", "Tensor.half", "fp16", role="moments", zeroed=9, step=15)
    other = replace(site, line="train.py:9", role="activations")
    own = _resumed(JUMPS, 50.0)
    made = RunView("as_is", "r", [*own.calls, *own.steps, site, other, own.outcome])
    found = answers(evidence(made, made))["optimizer_state_range"]
    assert found.line == "train.py:49"
    assert found.fix.controls == ("fp32_lines:train.py:49",)


@pytest.mark.parametrize(("role", "says"), [("moments", Status.FOUND), ("", Status.NOT_APPLICABLE)])
def test_moments_of_which_none_is_left_are_told_by_their_cast(role: str, says: Status) -> None:
    """Zeros fit every format; a script may also set its moments to zero itself."""
    site = HalfSite("cast", "train.py:49", "Tensor.to", "fp16", role, 9, elements=9, zeroed=9)
    own = _resumed(JUMPS, 50.0, 1.0, "")
    made = RunView("as_is", "r", [*own.calls, *own.steps, site, own.outcome])
    assert status("optimizer_state_range", evidence(made, made)) is says


@pytest.mark.parametrize(("rise", "says"), [(1.08, Status.FOUND), (1.0, Status.LATENT)])
def test_losses_on_the_same_batches_tell_more_than_their_scatter(rise: float, says: Status) -> None:
    """The control kept its state in fp32: batch by batch its loss is the lower one."""
    noisy = [1.0 + 0.3 * (n % 3) for n in range(30)]
    own = tuple(x * (rise if n > 15 else 1.0) for n, x in enumerate(noisy))
    made = evidence(_resumed(own, 50.0), fp32_run(steps(noisy)))
    found = answers(made)["optimizer_state_range"]
    assert found.status is says
    assert {m.name for m in found.evidence} >= {"update norm over the fp32 control's"}
