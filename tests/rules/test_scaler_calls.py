"""The rules that read the call log: the right order passes, and so does what only looks wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.diagnosis.findings import diagnose
from ampscope.observations import Call, ParameterGradient
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    BACKWARD,
    DIRECT_STEP,
    FALLING,
    FLAT,
    FP32_LOOP,
    OVERFLOWED,
    PLAIN_BACKWARD,
    SCALE,
    SCALED_LOOP,
    STEP,
    STEPS,
    UNSCALE,
    UPDATE,
    WITHOUT_SCALER,
    ZERO,
    answers,
    but,
    causes,
    evidence,
    fp32_run,
    log,
    run,
    search,
    status,
    steps,
)
from tests.helpers.evidence_of_runs import CLIP, GRAD

IN_CALLS = ("clip_before_unscale", "scaler_bypassed", "accumulation_scale_mismatch",
            "scaled_gradient_penalty", "scaler_state_lost")  # fmt: skip
ZERO_1, UNSCALE_1, STEP_1, DIRECT_1 = (
    replace(ZERO, subject="optimizer1"),
    replace(UNSCALE, note="optimizer1"),
    replace(STEP, note="optimizer1"),
    replace(DIRECT_STEP, subject="optimizer1"),
)
GET_SCALE = replace(UPDATE, name="get_scale")


def seen(cause: str, *pattern: Call) -> Status:
    """What the rule says of a run whose every step is ``pattern``."""
    return status(cause, evidence(run(steps(), calls=log(pattern))))


@pytest.mark.parametrize("cause", IN_CALLS)
def test_without_a_scaler_the_rule_does_not_apply(cause: str) -> None:
    assert seen(cause, *FP32_LOOP) is Status.NOT_APPLICABLE


def test_the_clip_comes_after_unscale() -> None:
    right = replace(CLIP, scaled=False, value=0.59)
    assert seen("clip_before_unscale", ZERO, SCALE, BACKWARD, UNSCALE, right, STEP, UPDATE) is (
        Status.PASSED
    )


def test_a_clip_inside_another_call_is_not_the_users() -> None:
    inner = replace(CLIP, nested=True)
    assert seen("clip_before_unscale", ZERO, SCALE, BACKWARD, inner, STEP, UPDATE) is Status.PASSED


@pytest.mark.parametrize(
    ("limit", "says"), [(1.0, Status.FOUND), (65536.0, Status.PASSED), (32768.0, Status.PASSED)]
)
def test_a_limit_that_carries_the_scale_is_right(limit: float, says: Status) -> None:
    # clip_grad_norm_(parameters, 1.0 * scaler.get_scale()) at 65,536, and with 0.5
    clip = replace(CLIP, note=repr(limit))
    assert seen("clip_before_unscale", ZERO, SCALE, BACKWARD, clip, STEP, UPDATE) is says


def test_the_norm_that_the_clip_saw_is_evidence() -> None:
    pattern = (ZERO, SCALE, BACKWARD, CLIP, STEP, UPDATE)
    said = answers(evidence(run(steps(), calls=log(pattern))))["clip_before_unscale"]
    values = {m.value for m in said.evidence}
    assert {38825.0, 65536.0, STEPS} <= values


def test_steps_through_the_scaler_bypass_nothing() -> None:
    assert seen("scaler_bypassed", *SCALED_LOOP) is Status.PASSED


@pytest.mark.parametrize(
    "pattern",
    [
        (ZERO, SCALE, BACKWARD, DIRECT_STEP),  # scaler.step left out
        (ZERO, PLAIN_BACKWARD, STEP, UPDATE),  # scaler.scale left out
        (ZERO, SCALE, BACKWARD, PLAIN_BACKWARD, STEP, UPDATE),  # one of two losses not scaled
    ],
)
def test_each_part_of_the_protocol_may_be_the_one_left_out(pattern: tuple[Call, ...]) -> None:
    assert seen("scaler_bypassed", *pattern) is Status.FOUND


def by_its_own_step(norm: float, bad: int = 0, pattern: tuple[Call, ...] = ()) -> Status:
    """A script that steps by itself on gradients of that norm; fp32's is 1."""
    made = steps(**WITHOUT_SCALER, grad_norm=norm)
    calls = log(pattern or (ZERO, SCALE, BACKWARD, DIRECT_STEP, UPDATE))
    own = run(but(made, range(bad), grad_nonfinite=10), calls=calls)
    return status("scaler_bypassed", evidence(own))


@pytest.mark.parametrize("norm", [0.3, 1.0, 3.0])
def test_gradients_that_the_script_unscaled_itself_bypass_nothing(norm: float) -> None:
    assert by_its_own_step(norm) is Status.PASSED


@pytest.mark.parametrize("norm", [61_000.0, 64.0, 1 / 65536])
def test_gradients_that_carry_the_scale_when_they_are_used_do(norm: float) -> None:
    # All of it, the rest that a division by 1,024 leaves of 65,536, or what two divisions leave.
    assert by_its_own_step(norm) is Status.FOUND


def test_its_own_step_lets_what_is_not_finite_through() -> None:
    assert by_its_own_step(1.0, bad=1) is Status.FOUND
    unscaled = (ZERO, SCALE, BACKWARD, UNSCALE, DIRECT_STEP, UPDATE)
    assert by_its_own_step(1.0, pattern=unscaled) is Status.PASSED
    assert by_its_own_step(1.0, bad=1, pattern=unscaled) is Status.FOUND


def test_a_step_after_that_of_the_scaler_is_one_too_many_whatever_the_norm() -> None:
    again = (ZERO, SCALE, BACKWARD, STEP, DIRECT_STEP, UPDATE)
    assert by_its_own_step(1.0, pattern=again) is Status.FOUND


@pytest.mark.parametrize(
    ("factor", "says"), [(65536.0, Status.PASSED), (1.0, Status.FOUND), (1024.0, Status.FOUND)]
)
def test_a_second_loss_is_scaled_where_it_is_that_of_fp32_times_the_scale(
    factor: float, says: Status
) -> None:
    second = [replace(PLAIN_BACKWARD, line="train.py:9")]
    calls = [
        replace(c, value=0.01 * factor) if c.line == "train.py:9" else c
        for c in log((ZERO, SCALE, BACKWARD, *second, STEP, UPDATE))
    ]
    full = [
        replace(c, value=0.01) if c.line == "train.py:9" else c
        for c in log((ZERO, PLAIN_BACKWARD, *second, DIRECT_STEP))
    ]
    control = run(steps(**WITHOUT_SCALER), calls=full, control="fp32", uses_autocast="")
    made = evidence(run(steps(), calls=calls), control)
    assert status("scaler_bypassed", made) is says


@pytest.mark.parametrize("limit", [float("inf"), 1e9])
def test_a_limit_that_no_gradient_meets_cuts_nothing(limit: float) -> None:
    clip = replace(CLIP, note=repr(limit))
    assert seen("clip_before_unscale", ZERO, SCALE, BACKWARD, clip, STEP, UPDATE) is Status.PASSED


@pytest.mark.parametrize(("norm", "says"), [(0.6, Status.PASSED), (38825.0, Status.FOUND)])
def test_a_clip_of_gradients_that_were_divided_by_hand_is_right(norm: float, says: Status) -> None:
    calls = log((ZERO, SCALE, BACKWARD, replace(CLIP, value=norm, note="0.5"), STEP, UPDATE))
    line = next(c.line for c in calls if c.name == "clip")
    plain = replace(CLIP, scaled=False, value=0.59, line=line)
    control = run(
        steps(**WITHOUT_SCALER), calls=log((ZERO, PLAIN_BACKWARD, plain, DIRECT_STEP)),
        control="fp32", uses_autocast="",
    )  # fmt: skip
    assert status("clip_before_unscale", evidence(run(steps(), calls=calls), control)) is says


def test_an_optimizer_without_scaler_beside_one_with_it_bypasses_nothing() -> None:
    second = (ZERO_1, PLAIN_BACKWARD, DIRECT_1)
    assert seen("scaler_bypassed", *SCALED_LOOP, *second) is Status.PASSED


def _norms(scale: float = 1.0, of: str = "abc") -> list[ParameterGradient]:
    """First gradients of three parameters; those in ``of`` times ``scale``."""
    return [
        ParameterGradient(0, "optimizer0", name, n, 100, 0, 0, 0.1 * (n + 1) * times)
        for n, name in enumerate("abc")
        for times in [scale if name in of else 1.0]
    ]


def _carrying(times: float, of: str = "abc", moved: float = 1.0, **facts: object) -> Evidence:
    """A run through the scaler, its first gradients ``times`` those of fp32, its first step
    ``moved`` times as long."""
    norms = [a.norm or 0.0 for a in _norms(times, of)]
    total, plain = math.hypot(*norms), math.hypot(0.1, 0.2, 0.3)
    own = steps(grad_norm=total, update_norm=0.1 * plain * moved, lr=0.1, **facts)
    control = steps(grad_norm=plain, update_norm=0.1 * plain, lr=0.1, **WITHOUT_SCALER)
    full = run(control, *_norms(), control="fp32", uses_autocast="")
    return evidence(run(own, *_norms(times, of)), full)


@pytest.mark.parametrize(
    ("times", "of", "moved", "says"),
    [
        (1 / 65536, "abc", 1 / 65536, Status.FOUND),  # unscaled twice
        (65536.0, "abc", 65536.0, Status.FOUND),  # scaled twice
        (65536.0**-2, "abc", 65536.0**-2, Status.FOUND),
        (1 / 65536, "abc", 1.0, Status.LATENT),  # Adam's first step is as long
        (1 / 65536, "ab", 1.0, Status.FOUND),  # shared by two optimizers, of SGD
        (1.2 / 65536, "abc", 1.0, Status.LATENT),  # half gradients of another length
        (1.0, "abc", 1.0, Status.PASSED),
        (1 / 8.0, "abc", 1 / 8.0, Status.PASSED),  # accumulation that divides in one run alone
        (0.9 / 300, "abc", 1.0, Status.PASSED),  # a clip
        (1 / 20000, "ab", 1.0, Status.PASSED),  # flushed to zero, but for a little
    ],
)
def test_a_power_of_the_scale_in_the_gradients_tells_how_often_it_was_applied(
    times: float, of: str, moved: float, says: Status
) -> None:
    assert status("scaler_bypassed", _carrying(times, of, moved)) is says


def test_a_clip_that_leaves_its_limit_over_the_scale_is_no_second_division() -> None:
    made = _carrying(1 / 65536, moved=1 / 65536)
    calls = log((ZERO, SCALE, BACKWARD, replace(CLIP, line="t.py:1"), STEP, UPDATE))
    clipped = run([*made.baseline.steps, *_norms(1 / 65536)], calls=calls)
    assert status("scaler_bypassed", evidence(clipped, made.fp32)) is Status.PASSED


@pytest.mark.parametrize(
    ("over", "says"),
    [(1024.0**2, Status.FOUND), (1024.0, Status.NOT_APPLICABLE), (1.0, Status.NOT_APPLICABLE)],
)
def test_a_factor_by_hand_that_is_divided_out_twice_is_found(over: float, says: Status) -> None:
    """Undivided it may be the weight of the loss."""
    note = replace(PLAIN_BACKWARD, note="mul 1024.0")
    norm = 512.0 / over
    own = steps(
        grad_norm=norm, backward_norm=512.0, update_norm=0.1 * norm, lr=0.1, **WITHOUT_SCALER
    )
    made = evidence(run(own, calls=log((ZERO, note, DIRECT_STEP))), None)
    assert status("scaler_bypassed", made) is says


@pytest.mark.parametrize(
    ("seen_norm", "left", "says"),
    [
        (4096.0 * 0.5, 1 / 4096, Status.FOUND),  # clipped to 1, then divided
        (0.5, 0.5, Status.NOT_APPLICABLE),  # divided, and below the limit
        (1.5, 1.0, Status.NOT_APPLICABLE),  # divided, then clipped to 1
        (4096.0 * 0.5, 1.0, Status.NOT_APPLICABLE),  # a weight of the loss: nothing divides it
    ],
)
def test_a_clip_of_gradients_of_a_loss_scaled_by_hand(
    seen_norm: float, left: float, says: Status
) -> None:
    note = replace(PLAIN_BACKWARD, note="mul 4096.0")
    clip = replace(CLIP, scaled=False, value=seen_norm, note="1.0")
    own = steps(grad_norm=left, backward_norm=4096.0 * 0.5, lr=0.1, **WITHOUT_SCALER)
    made = evidence(run(own, calls=log((ZERO, note, clip, DIRECT_STEP))), None)
    assert status("clip_before_unscale", made) is says


def test_gradients_that_are_not_cleared_after_a_skipped_step_skip_the_next_ones() -> None:
    """zero_grad is called where a step was taken: always in fp32, and never once one is skipped."""
    cleared = steps(FLAT, **OVERFLOWED)
    kept = but(cleared, range(1, STEPS), kept_nonfinite=True)
    fp32 = fp32_run(None)  # its loop calls zero_grad
    cause = "accumulation_scale_mismatch"
    found = answers(evidence(run(kept, calls=log(SCALED_LOOP[1:])), fp32))[cause]
    assert (found.status, found.line) == (Status.FOUND, "train.py:1")  # the loop's zero_grad
    assert found.fix.controls == ("cleared_grads",)
    falling = evidence(run(search(kept, 65536.0, STEPS), calls=log(SCALED_LOOP[1:])), fp32)
    assert causes(diagnose(falling)) == [cause]
    sound = (
        # Cleared, by zero_grad or by something that is not in the log, and skipped all the same.
        evidence(run(cleared, calls=log(SCALED_LOOP)), fp32),
        evidence(run(cleared, calls=log(SCALED_LOOP[1:])), fp32),
        # Taken without a zero_grad: they are cleared otherwise.
        evidence(run(but(kept, (9,), skipped=False, grad_nonfinite=0),
                     calls=log(SCALED_LOOP[1:])), fp32),
    )  # fmt: skip
    assert {status(cause, one) for one in sound} == {Status.PASSED}


@pytest.mark.parametrize(
    ("left", "falls", "says"),
    [
        (True, True, Status.FOUND),
        (False, True, Status.NOT_APPLICABLE),  # a search whose gradients are cleared
        (True, False, Status.NOT_APPLICABLE),  # micro-batches of one window
    ],
)
def test_what_a_script_leaves_in_grad_when_it_leaves_the_step_out_itself(
    left: bool, falls: bool, says: Status
) -> None:
    calls: list[Call] = []
    for number in range(12):
        note = f"mul {2.0 ** (22 - number * falls)}"
        calls.append(replace(PLAIN_BACKWARD, seq=len(calls), note=note, line="train.py:8"))
        if left and number:
            calls.append(Call(len(calls), 0, "kept"))
    said = answers(evidence(run([], calls=calls)))["accumulation_scale_mismatch"]
    assert said.status is says
    if says is Status.FOUND:
        assert said.line == "train.py:1"  # the control's zero_grad


def test_what_should_clear_the_gradients_is_named_wherever_it_stands() -> None:
    """No run calls zero_grad in its loop, or for another optimizer alone: then the step is named;
    a single call before the loop is what should stand in it."""
    cause, loop = "accumulation_scale_mismatch", log(SCALED_LOOP[1:])
    kept = but(steps(FLAT, **OVERFLOWED), range(1, STEPS), kept_nonfinite=True)
    never = answers(evidence(run(kept, calls=loop), None))[cause]
    assert (never.status, never.line) == (Status.FOUND, "train.py:3")
    other = answers(evidence(run(kept, calls=log((ZERO_1, *SCALED_LOOP[1:]))), None))[cause]
    assert (other.status, other.line) == (Status.FOUND, "train.py:4")
    before = [replace(ZERO, seq=-1, line="train.py:77"), *loop]
    once = answers(evidence(run(kept, calls=before), None))[cause]
    assert (once.status, once.line) == (Status.FOUND, "train.py:77")


def test_accumulation_may_unscale_and_update_at_its_end() -> None:
    pattern = (ZERO, SCALE, BACKWARD, SCALE, BACKWARD, UNSCALE, STEP, UPDATE)
    assert seen("accumulation_scale_mismatch", *pattern) is Status.PASSED


def test_two_optimizers_that_step_in_turn_accumulate_nothing() -> None:
    # A GAN that clears after the step: the other's update lies between two backward passes, and
    # its own gradients have been used up by then.
    turn, other = (SCALE, BACKWARD, STEP, UPDATE, ZERO), (SCALE, BACKWARD, STEP_1, UPDATE, ZERO_1)
    assert seen("accumulation_scale_mismatch", *turn, *other) is Status.PASSED


def test_unscaling_another_optimizer_is_no_mismatch() -> None:
    pattern = (ZERO, ZERO_1, SCALE, BACKWARD, UNSCALE_1, SCALE, BACKWARD, UNSCALE, STEP, UPDATE)
    assert seen("accumulation_scale_mismatch", *pattern) is Status.PASSED


@pytest.mark.parametrize("inside", [UNSCALE, UPDATE])
def test_unscale_or_update_alone_is_enough_inside_a_window(inside: Call) -> None:
    pattern = (ZERO, SCALE, BACKWARD, inside, SCALE, BACKWARD, STEP, UPDATE)
    assert seen("accumulation_scale_mismatch", *pattern) is Status.FOUND


@pytest.mark.parametrize(
    "pattern",
    [
        (ZERO, SCALE, GRAD, GET_SCALE, BACKWARD, STEP, UPDATE),
        (ZERO, GET_SCALE, SCALE, GRAD, BACKWARD, STEP, UPDATE),
    ],
)
def test_a_penalty_that_reads_the_scale_divides_by_it(pattern: tuple[Call, ...]) -> None:
    assert seen("scaled_gradient_penalty", *pattern) is Status.PASSED


@pytest.mark.parametrize(("grown", "says"), [(1.0, Status.PASSED), (4e9, Status.FOUND)])
def test_a_penalty_whose_loss_is_that_of_fp32_carries_no_scale(grown: float, says: Status) -> None:
    calls = log((ZERO, SCALE, GRAD, BACKWARD, STEP, UPDATE), [x * grown for x in FALLING])
    full = log((ZERO, GRAD, PLAIN_BACKWARD, DIRECT_STEP))
    at = [
        [replace(c, line="t.py:4") if c.name == "backward" else c for c in r] for r in (calls, full)
    ]
    control = run(steps(**WITHOUT_SCALER), calls=at[1], control="fp32", uses_autocast="")
    made = evidence(run(steps(), calls=at[0]), control)
    assert status("scaled_gradient_penalty", made) is says


def test_a_scale_that_is_read_for_the_log_after_the_penalty_is_no_division() -> None:
    pattern = (ZERO, SCALE, GRAD, BACKWARD, GET_SCALE, STEP, UPDATE)
    said = answers(evidence(run(steps(), calls=log(pattern))))["scaled_gradient_penalty"]
    assert said.status is Status.FOUND
    values = {m.name: m.value for m in said.evidence}
    assert values == {"penalties with scaled gradients": STEPS, "loss of the baseline": FALLING[0]}


def test_a_scale_that_torch_reads_for_itself_is_no_division() -> None:
    inner = replace(GET_SCALE, nested=True)
    assert seen("scaled_gradient_penalty", ZERO, SCALE, inner, GRAD, BACKWARD, STEP, UPDATE) is (
        Status.FOUND
    )


@pytest.mark.parametrize("other", [replace(GRAD, scaled=False), replace(GRAD, create_graph=False)])
def test_gradients_unscaled_or_without_graph_make_no_scaled_penalty(
    other: Call,
) -> None:
    pattern = (ZERO, SCALE, other, BACKWARD, STEP, UPDATE)
    assert seen("scaled_gradient_penalty", *pattern) is Status.NOT_APPLICABLE
