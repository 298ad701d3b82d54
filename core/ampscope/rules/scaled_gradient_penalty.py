"""Gradients entered a loss while they still carried the loss scale.

What it detects
    torch.autograd.grad with create_graph on a scaled output, and no look at the scale before
    the next backward pass, whose loss is not as large as in the fp32 control.

Why it matters
    A penalty is not linear in the gradients, so its value depends on the scale of the day.

Blind spots
    A penalty so small that the loss is the same with the scale in it; a division by a scale that
    was read long before, where no fp32 control was run.

Remedy
    Divide the gradients by scaler.get_scale() before the norm.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scaled_gradients import losses_as_fp32
from ampscope.control import BASELINE
from ampscope.observations import Call
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, not_applicable, passed


def check(evidence: Evidence) -> Verdict:
    """Found in the call log."""
    run = evidence.baseline
    grads = [c for c in run.calls if c.name == "grad" and c.create_graph and c.scaled]
    if not grads:
        return not_applicable("No gradient of a scaled output entered a loss.")
    wrong = [c for c in grads if not _scale_read(run, c)]
    if len(wrong) * 2 <= len(grads):
        return passed("The scale is read before the gradients are used.")
    first = wrong[0]
    own = next((c for c in run.calls if c.seq > first.seq and c.name == "backward"), None)
    if own is not None and losses_as_fp32(run, evidence.fp32, own.line):
        return passed("The loss that the gradients enter is as large as in fp32.")
    values = [Measurement("penalties with scaled gradients", len(wrong), 0, BASELINE, first.step)]
    if own is not None and own.value is not None:
        values.append(Measurement("loss of the baseline", own.value, None, BASELINE, own.step))
    return Verdict(
        Status.FOUND,
        f"Line {first.line} takes gradients of a scaled loss for a penalty and never divides them"
        " by the scale, so the penalty grows with the scale.",
        step=first.step,
        line=first.line,
        evidence=tuple(values),
        fix=Fix("rewrite_op", "Divide the gradients by scaler.get_scale() before the norm.", PATCH),
    )


PATCH = """scaled = torch.autograd.grad(scaler.scale(loss), inputs, create_graph=True)
grads = [g / scaler.get_scale() for g in scaled]
"""


def _scale_read(run: RunView, grad: Call) -> bool:
    """Whether get_scale was called since the last update and before the next backward."""
    for call in reversed(run.calls[: grad.seq]):
        if call.nested:
            continue
        if call.name == "get_scale":
            return True
        if call.name in ("update", "backward", "scaler_step"):
            break
    for call in run.calls[grad.seq + 1 :]:
        if call.name == "backward" and not call.nested:
            return False
        if call.name == "get_scale" and not call.nested:
            return True
    return False


RULE = Rule(
    code="AMP020",
    id="scaled_gradient_penalty",
    title="A gradient penalty used scaled gradients",
    definition="Gradients entered a loss while they still carried the loss scale.",
    check=check,
    needs=(BASELINE,),
    order=34,
    explains=(
        "loss_magnitude_overflow",
        "loss_scale_too_high",
        "activation_overflow",
        "elementwise_overflow",
        "reduction_overflow",
        "singular_gradient",
        "gradient_underflow",
    ),
)
