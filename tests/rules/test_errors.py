"""The rules that read an exception, which the real GradScaler raises here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ampscope.diagnosis.findings import diagnose
from ampscope.observations import Call, OpUse
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FALLING,
    LINE,
    NAN,
    OVERFLOWED,
    STEPS,
    WITHOUT_SCALER,
    answers,
    bad_op,
    causes,
    evidence,
    fp32_run,
    run,
    status,
    steps,
)
from tests.helpers.evidence_of_ops import SLOPE, banned_loss, custom_function
from tests.helpers.evidence_of_runs import raised

torch = pytest.importorskip("torch")


def _parts(dtype: Any = None) -> tuple[Any, Any]:
    weight = torch.nn.Parameter(torch.ones(2, dtype=dtype or torch.float32))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    return scaler, optimizer


def unscale_twice() -> None:
    scaler, optimizer = _parts()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def step_twice() -> None:
    scaler, optimizer = _parts()
    scaler.step(optimizer)
    scaler.step(optimizer)


def unscale_after_step() -> None:
    scaler, optimizer = _parts()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def update_without_step() -> None:
    scaler, _ = _parts()
    scaler.update()


def step_without_gradients() -> None:
    scaler, optimizer = _parts()
    optimizer.zero_grad()
    scaler.step(optimizer)


def update_before_scale() -> None:
    torch.amp.GradScaler("cpu").update()


ORDERS = [
    unscale_twice, step_twice, unscale_after_step, update_without_step, step_without_gradients,
    update_before_scale,
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
def test_what_grad_scaler_raises_is_a_protocol_error(order: Callable[[], None]) -> None:
    with pytest.raises((RuntimeError, AssertionError)) as caught:
        order()
    found = diagnose(raised(type(caught.value).__name__, str(caught.value)))
    assert causes(found) == ["scaler_protocol_error"]


def test_grad_scaler_refuses_gradients_of_half_parameters() -> None:
    scaler, optimizer = _parts(torch.float16)
    with pytest.raises(ValueError, match="FP16") as caught:
        scaler.unscale_(optimizer)
    found = diagnose(raised("ValueError", str(caught.value)))
    assert causes(found) == ["fp16_params_with_scaler"]


def test_the_line_that_casts_the_module_is_named_and_one_of_another_format_is_not() -> None:
    casts = [Call(0, 0, "cast", dtype="bf16", line="train.py:2"),
             Call(1, 0, "cast", dtype="fp16", line="train.py:4")]  # fmt: skip
    lines = {}
    for count in (1, 2):
        made = raised("ValueError", "Attempting to unscale FP16 gradients.")
        made.baseline.calls.extend(casts[:count])
        lines[count] = diagnose(made).findings[0].verdict.line
    assert lines == {1: "train.py:9", 2: "train.py:4"}


def test_half_parameters_without_a_scaler_are_not_refused() -> None:
    made = evidence(run(steps(weight_dtypes="fp16", grad_dtypes="fp16", **WITHOUT_SCALER)))
    assert status("fp16_params_with_scaler", made) is Status.PASSED


@pytest.mark.parametrize("cause", ["scaler_protocol_error", "fp16_params_with_scaler"])
def test_any_other_exception_is_somebody_elses(cause: str) -> None:
    assert status(cause, raised("FileNotFoundError", "No such file: 'data.npz'")) is Status.PASSED


def test_the_exception_and_its_line_are_the_evidence() -> None:
    verdict = diagnose(raised("RuntimeError", "step() has already been called since")).findings[0]
    assert verdict.verdict.line == "train.py:9"
    assert verdict.verdict.evidence[0].name == "RuntimeError"


def test_a_banned_loss_under_autocast_is_found_though_it_trains_here() -> None:
    found = diagnose(banned_loss())
    assert causes(found) == ["unsafe_op_under_autocast"]
    assert found.findings[0].verdict.op == "aten.binary_cross_entropy"


def test_cuda_says_so_itself() -> None:
    text = (
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."
        "\nMany models use a sigmoid layer right before the binary cross entropy layer."
    )
    assert causes(diagnose(raised("RuntimeError", text))) == ["unsafe_op_under_autocast"]


def test_mixed_dtypes_count_only_beside_a_custom_function() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 2, dtype=torch.float16) @ torch.ones(2, 2)
    text = str(caught.value)
    assert status("unsafe_op_under_autocast", raised("RuntimeError", text)) is Status.PASSED
    use = OpUse("undecorated_function", "SwishOp", "act", LINE, 0)
    ended: dict[str, Any] = {"ended": "exception", "error_type": "RuntimeError", "error_text": text}
    assert causes(diagnose(evidence(run([], use, **ended)))) == ["unsafe_op_under_autocast"]


def test_a_function_with_custom_fwd_is_safe() -> None:
    usual = custom_function().baseline
    use = replace(usual.uses[0], name="custom_function")
    made = evidence(run(usual.steps, *usual.bad_ops, use))
    assert causes(diagnose(made)) == ["elementwise_overflow"]


def test_a_failure_outside_the_function_is_not_the_functions() -> None:
    use = OpUse("undecorated_function", "SwishOp", "act", LINE, 0)
    outside = bad_op("aten.exp", fp32_max=162754.8)
    made = evidence(run(steps((NAN,) * STEPS, **OVERFLOWED), outside, use))
    assert causes(diagnose(made)) == ["elementwise_overflow"]


def test_a_function_that_fails_in_fp32_too_is_wrong_in_itself() -> None:
    usual = custom_function().baseline
    dead = fp32_run(steps((NAN,) * STEPS, grad_nonfinite=1000, weight_nonfinite=1000))
    made = evidence(run(usual.steps, *usual.bad_ops, *usual.uses), dead)
    assert status("unsafe_op_under_autocast", made) is Status.PASSED


def test_the_backward_pass_of_a_function_is_the_functions_too() -> None:
    use = OpUse("undecorated_function", "SqrtOp", "act", LINE, 0)
    inside = replace(SLOPE, node="SqrtOpBackward")
    made = evidence(run(steps(FALLING, **OVERFLOWED), inside, use))
    assert causes(diagnose(made)) == ["unsafe_op_under_autocast"]
    assert answers(made)["singular_gradient"].status is Status.PASSED
