"""How high a loss scale is borne: a search, a scale too high, a loss too large."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scale_facts import scale_raised, scale_set_at
from ampscope.diagnosis.findings import diagnose
from ampscope.observations import READ_GRADIENT, Call, SourceText
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    DIRECT_STEP,
    FALLING,
    FLAT,
    INF,
    NAN,
    OVERFLOWED,
    PLAIN_BACKWARD,
    STEPS,
    WITHOUT_SCALER,
    ZERO,
    answers,
    bad_op,
    but,
    causes,
    evidence,
    fp32_run,
    log,
    run,
    search,
    status,
    steps,
    tensor,
)
from tests.helpers.evidence_of_ops import ACTIVATION, STEEP
from tests.helpers.evidence_of_runs import loss_too_large, scale_too_high

LONG = [2.0 - 0.02 * n for n in range(60)]


def searched(init: float, skips: int, losses: list[float] = LONG) -> Evidence:
    """``skips`` overflows at the start, and none after."""
    return evidence(run(search(steps(losses), init, skips)), fp32_run(steps(losses)))


@pytest.mark.parametrize(
    ("init", "skips"), [(2.0**24, 6), (2.0**16, 1), (2.0**24, 20), (2.0**34, 12)]
)
def test_a_search_that_ends_is_no_fault(init: float, skips: int) -> None:
    assert diagnose(searched(init, skips)).verdict == "no_fault"


def test_a_search_of_22_in_60_from_2_to_the_40_is() -> None:
    found = diagnose(scale_too_high()).findings[0]
    assert found.cause == "loss_scale_too_high"
    values = {m.name: m.value for m in found.verdict.evidence}
    assert values["skipped steps"] == 22
    assert values["initial scale"] == 2.0**40
    assert values["scale at the end"] == 2.0**18


def test_a_search_that_ends_at_4_needs_no_scale_below_1() -> None:
    made = searched(65536.0, 14)
    assert status("loss_magnitude_overflow", made) is Status.PASSED


def test_a_search_that_ends_below_1_is_no_high_scale() -> None:
    made = loss_too_large()
    assert status("loss_scale_too_high", made) is Status.PASSED
    assert status("loss_magnitude_overflow", made) is Status.FOUND
    fix = answers(made)["loss_magnitude_overflow"].fix
    assert "bf16" in fix.text
    assert fix.controls == ("bf16",)
    old = Evidence(made.runs, "cuda", emulates_bf16=True)  # of a GPU without bf16
    fix = answers(old)["loss_magnitude_overflow"].fix
    assert fix.text.startswith("Average the loss")
    assert "bf16" not in fix.text
    assert fix.controls == ()


def test_a_scale_that_falls_on_and_on_below_1_is_no_large_loss() -> None:
    """Eight steps were taken at 2^16; then NaN came back from every batch, at whatever scale."""
    usual = [0.7] * 60
    made = but(steps(usual), range(8, 60), **OVERFLOWED)
    made = [replace(a, scale=2.0 ** (16 - max(a.step - 8, 0))) for a in made]
    seen = evidence(run(made), fp32_run(steps(usual)))
    assert status("loss_magnitude_overflow", seen) is Status.PASSED


def test_a_scale_that_grows_every_few_steps_is_too_high() -> None:
    # Growth every second step: a third of all steps overflow, between 2^15 and 2^16.
    made = but(steps(LONG), range(2, 60, 3), **OVERFLOWED, scale=2.0**16)
    made = but(made, [n for n in range(60) if n % 3 != 2], scale=2.0**15)
    assert causes(diagnose(evidence(run(made), fp32_run(steps(LONG))))) == ["loss_scale_too_high"]


def test_a_scale_with_a_floor_that_is_not_borne_is_too_high() -> None:
    stuck = run(steps(FLAT, **OVERFLOWED))
    at_one = run(steps(FALLING, scale=1.0))
    made = evidence(stuck, **{"scale:1": at_one})
    assert causes(diagnose(made)) == ["loss_scale_too_high"]
    assert status("loss_scale_too_high", evidence(stuck)) is Status.PASSED


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_search_that_the_end_of_the_run_cuts_short_is_no_verdict(count: int) -> None:
    made = search(steps(FALLING[:count]), 2.0**24, count)
    at_one = run(steps(FALLING[:count], scale=1.0))
    cut = evidence(run(made), **{"scale:1": at_one})
    said = answers(cut)["loss_scale_too_high"]
    assert said.status is Status.INCONCLUSIVE
    assert "still falling" in said.reason
    assert diagnose(cut).verdict != "fault"


def by_hand(factor: float) -> Evidence:
    """The loss is multiplied by ``factor``, with no scaler; a backward product overflows."""
    backward: Call = replace(PLAIN_BACKWARD, note=f"mul {factor:g}")
    calls = log((ZERO, backward, DIRECT_STEP), FLAT)
    made = steps(FLAT, grad_nonfinite=1000, grad_norm=None, **WITHOUT_SCALER)
    return evidence(run(made, STEEP, calls=calls))


def test_a_static_scale_by_hand_is_too_high() -> None:
    assert causes(diagnose(by_hand(65536.0))) == ["loss_scale_too_high"]


@pytest.mark.parametrize(
    ("left", "way", "cause"),
    [
        (4e6, 0.01, "loss_magnitude_overflow"),  # Adam's steps do not tell; nothing divides before
        (4e6 * 65536, 0.01, "loss_scale_too_high"),  # the script divides between backward and step
        (4e6, 1e-3 * 4e6 / 65536, "loss_scale_too_high"),  # the optimizer divides within its step
    ],
)
def test_a_factor_that_nothing_divides_by_is_a_part_of_the_loss(
    left: float, way: float, cause: str
) -> None:
    usual = by_hand(65536.0)
    finite = steps(grad_norm=4e6, backward_norm=left, lr=1e-3, update_norm=way, **WITHOUT_SCALER)
    control = run(finite, calls=usual.baseline.calls, control="fp32")
    losses = [replace(a, loss=1e6) for a in control.steps]
    control.steps[:] = losses
    control.calls[:] = [replace(c, value=1e6) if c.name == "backward" else c for c in control.calls]
    found = diagnose(evidence(usual.baseline, control)).findings
    assert [f.cause for f in found] == [cause]
    if cause == "loss_magnitude_overflow":
        assert "nothing divides the gradients by it" in found[0].verdict.reason


@pytest.mark.parametrize(
    ("floor", "in_fp32", "found"),
    [
        (2.0**18, 2.0**21, ["loss_scale_too_high"]),  # 2^21 at a factor of 2^20 is 2 at one of 1
        (2.0**18, 2.0**40, []),  # too large at a factor of 1, too
        (1.0, 2.0**21, []),  # it falls as far as it can
    ],
)
def test_a_factor_by_hand_that_falls_no_further(
    floor: float, in_fp32: float, found: list[str]
) -> None:
    """A manager of the script's own halves its factor down to ``floor``, and drops every batch."""
    factors = [max(2.0 ** (20 - n), floor) for n in range(STEPS)]
    calls = [
        replace(PLAIN_BACKWARD, seq=n, value=1.5, note=f"mul {factor:g}", line="train.py:14")
        for n, factor in enumerate(factors)
    ]
    drops = [
        replace(
            PLAIN_BACKWARD, seq=STEPS + n, name="read", subject=READ_GRADIENT, value=None, note="0"
        )
        for n in range(STEPS)
    ]
    overflow = replace(STEEP, fp32_max=in_fp32, count=STEPS)
    made = evidence(run([], overflow, calls=[*calls, *drops]))
    assert [f.cause for f in diagnose(made).findings] == found
    if found:
        said = diagnose(made).findings[0].verdict
        assert said.line == "train.py:14"
        assert "stays at 262,144" in said.reason


@pytest.mark.parametrize(
    ("in_fp32", "found"),
    [
        (2.0**30, ["loss_scale_too_high"]),  # 2 at a factor of 1
        (2.0**60, []),  # too large at a factor of 1, too
    ],
)
def test_a_factor_by_hand_that_rises_into_overflow(in_fp32: float, found: list[str]) -> None:
    """improved-diffusion, with a growth of 1 and without its look at the gradients."""
    calls = log((ZERO, PLAIN_BACKWARD, DIRECT_STEP), FLAT)
    calls = [
        replace(c, note=f"mul {2.0 ** (20 + c.step):g}") if c.name == "backward" else c
        for c in calls
    ]
    made = steps(FLAT, grad_nonfinite=1000, grad_norm=None, **WITHOUT_SCALER)
    overflow = replace(STEEP, fp32_max=in_fp32, step=9)
    verdict = diagnose(evidence(run(made, overflow, calls=calls)))
    assert [f.cause for f in verdict.findings] == found
    if found:
        assert "to 5.36871e+08 at step 9" in verdict.findings[0].verdict.reason


def test_a_weight_of_a_loss_is_no_static_scale() -> None:
    assert status("loss_scale_too_high", by_hand(2.0)) is Status.NOT_APPLICABLE


def test_a_loss_that_is_not_finite_is_cured_by_no_scale() -> None:
    made = evidence(run(search(steps((NAN,) * STEPS), 2.0**40, STEPS), ACTIVATION))
    assert causes(diagnose(made)) == ["activation_overflow"]


def test_the_line_is_where_the_scaler_is_made() -> None:
    made = scale_too_high()
    name = made.baseline.steps[0].scaler
    made.baseline.calls.append(Call(0, 0, "scaler_new", subject=name, line="train.py:3"))
    found = diagnose(made).findings[0]
    assert (found.cause, found.verdict.line) == ("loss_scale_too_high", "train.py:3")


def test_the_line_is_the_update_that_sets_the_scale_again() -> None:
    """After each skipped step one update halves the scale, and another sets it."""
    made = but(steps(LONG), range(60), scale=2.0**30, **OVERFLOWED)
    name = made[0].scaler
    pattern = [
        Call(0, 0, "scaler_step", subject=name),
        Call(0, 0, "update", subject=name, value=2.0**29),
        Call(0, 0, "update", subject=name, value=2.0**30),
    ]
    calls = [Call(0, 0, "scaler_new", subject=name, line="train.py:9"), *log(pattern, LONG, 1)]
    assert scale_set_at(run(made, calls=calls)) == "train.py:3"
    falls = [c for c in calls if c.value != 2.0**30]
    assert scale_set_at(run(made, calls=falls)) == "train.py:9"
    assert scale_set_at(run(steps(LONG), calls=calls)) == ""


def _put_up(source: str, by: Call | None) -> RunView:
    """Every second step overflows: the scale falls from 2^20 and is put up again before the next
    loss, by a call or by a line of ``source``."""
    made = but(steps(LONG), range(1, 60, 2), **OVERFLOWED)
    made = [replace(a, scale=2.0**20) for a in made]
    name = made[0].scaler
    one = [
        Call(0, 0, "scale", subject=name, value=2.0**20, scaled=True),
        Call(0, 0, "backward", subject=name, scaled=True),
        Call(0, 0, "scaler_step", subject=name, note="optimizer0"),
        Call(0, 0, "update", subject=name, value=2.0**19),
        *([replace(by, subject=name)] if by is not None else []),
    ]
    calls = [Call(0, 0, "scaler_new", subject=name, line="train.py:90"), *log(one, LONG, 1)]
    return run(made, SourceText("train.py", tuple(source.splitlines())), calls=calls)


@pytest.mark.parametrize(
    ("source", "by", "line"),
    [
        ("", Call(0, 0, "scaler_load_state_dict", line="train.py:70"), "train.py:70"),
        ("x = 1\nscaler._scale.fill_(high)", None, "train.py:2"),
        ("x = 1\n\nscaler._scale = held", None, "train.py:3"),
        ("print(scaler._scale == 1)  # scaler._scale = 2", None, "train.py:90"),
        ("", None, "train.py:90"),  # nothing says how
    ],
)
def test_the_line_is_the_script_s_own_that_puts_the_scale_up(
    source: str, by: Call | None, line: str
) -> None:
    held = _put_up(source, by)
    raised = scale_raised(held)
    assert raised is not None
    assert (raised.scale, raised.count) == (2.0**20, 59)
    assert scale_set_at(held) == line


def test_a_resume_and_a_scaler_s_own_growth_put_no_scale_up() -> None:
    load = Call(0, 0, "scaler_load_state_dict", line="train.py:70")
    held = _put_up("", load)
    loads = [c for c in held.calls if c.name == load.name]
    once = [c for c in held.calls if c.name != load.name or c is loads[0]]
    settled = [replace(c, value=2.0**20) if c.name == "update" else c for c in once]
    assert scale_raised(run(held.steps, calls=settled)) is None


@pytest.mark.parametrize("cause", ["loss_scale_too_high", "loss_magnitude_overflow"])
def test_without_any_overflow_the_scale_is_not_discussed(cause: str) -> None:
    made = evidence(run(steps(**WITHOUT_SCALER), calls=log((ZERO, PLAIN_BACKWARD, DIRECT_STEP))))
    assert status(cause, made) is Status.NOT_APPLICABLE


def test_fp32_gradients_that_overflow_too_need_no_other_scale() -> None:
    usual = loss_too_large()
    infinite = fp32_run(steps(FLAT, grad_nonfinite=5, grad_norm=None))
    assert status("loss_magnitude_overflow", evidence(usual.baseline, infinite)) is Status.PASSED


@pytest.mark.parametrize(("loss", "says"), [(4.6e6, Status.FOUND), (1.5, Status.PASSED)])
def test_without_a_scaler_only_a_large_loss_is_too_large(loss: float, says: Status) -> None:
    bad = steps((loss,) * STEPS, grad_nonfinite=9, **WITHOUT_SCALER)
    fp32 = fp32_run(steps([loss * (1 - 0.02 * n) for n in range(STEPS)]))
    assert status("loss_magnitude_overflow", evidence(run(bad, STEEP), fp32)) is says


def test_a_scale_below_1_does_not_make_a_nan_loss_large() -> None:
    losses = [*(NAN,) * 18, *LONG[18:]]
    made = evidence(run(search(steps(losses), 65536.0, 18), ACTIVATION), fp32_run(steps(LONG)))
    assert status("loss_magnitude_overflow", made) is Status.PASSED


def test_a_product_with_a_static_scale_that_overflows_itself_is_the_scale() -> None:
    # 1.5 times 65,536 is 98,304: the loss is finite, and its product in half is not.
    product = bad_op("aten.mul", tensor(1.5), scalars=(65536.0,), total=1, pos_inf=1, module="")
    backward = replace(PLAIN_BACKWARD, note="mul 65536")
    calls = log((ZERO, backward, DIRECT_STEP), (INF,) * STEPS)
    made = steps((INF,) * STEPS, grad_nonfinite=1000, grad_norm=None, **WITHOUT_SCALER)
    found = diagnose(evidence(run(made, product, calls=calls)))
    assert causes(found) == ["loss_scale_too_high"]


def test_a_scale_that_grows_back_from_below_1_is_no_high_scale() -> None:
    made = but(steps(LONG), range(2, 60, 3), **OVERFLOWED, scale=1.0)
    made = but(made, [n for n in range(60) if n % 3 != 2], scale=0.5)
    assert status("loss_scale_too_high", evidence(run(made), fp32_run(steps(LONG)))) is (
        Status.PASSED
    )


def every_seventh(*, falls: bool = True) -> Evidence:
    """A gradient that is NaN at any scale, with a finite loss; a skip halves the scale."""
    scaled = [replace(a, scale=1024.0 / 2 ** (a.step // 7)) for a in steps(LONG)]
    made = but(scaled if falls else steps(LONG), range(6, 60, 7), **OVERFLOWED)
    return evidence(run(made), fp32_run(steps(LONG)))


def test_skips_to_which_the_scale_never_grew_are_not_of_its_growth() -> None:
    assert status("loss_scale_too_high", every_seventh()) is Status.PASSED


def test_a_constant_scale_that_overflows_now_and_then_is_too_high() -> None:
    assert status("loss_scale_too_high", every_seventh(falls=False)) is Status.FOUND


def test_a_scale_that_grows_into_nan_gradients_which_fp32_has_too_is_not_too_high() -> None:
    made = but(steps(LONG), range(2, 60, 3), **OVERFLOWED, scale=2.0**16)
    made = but(made, [n for n in range(60) if n % 3 != 2], scale=2.0**15)
    fp32 = fp32_run(but(steps(LONG), [5], grad_nonfinite=4, grad_norm=None))
    assert status("loss_scale_too_high", evidence(run(made), fp32)) is Status.PASSED
    assert status("loss_scale_too_high", evidence(run(made))) is Status.FOUND
