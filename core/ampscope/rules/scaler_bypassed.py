"""A part of the scaler's protocol was left out, or done twice.

What it detects
    An optimizer.step that the script calls itself on gradients of a scaled loss, also after
    scaler.step; or scaler.step on gradients of a loss that was not scaled. Whatever was called:
    gradients at the step that are the fp32 control's times a power of the loss scale, of all
    parameters or of some; and a factor of the script's own that divides the gradients twice.

Why it matters
    Gradients that are not finite reach the weights, or every update is 65,536 times too large
    or small.

Blind spots
    Which method was called decides nothing where the fp32 control shows whether gradients carry the
    scale when they are used. At scales below 16 it cannot, and the calls decide. A factor of the
    script's own that nothing divides may be the weight of a loss. Adam and its kin divide by the
    size of the gradients and hide the scale in them: then it is latent.

Remedy
    Use scale, step and update once each, and nothing beside them.
"""

from __future__ import annotations

from ampscope.analysis.call_windows import Bypasses, bypasses
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.gradient_ratio import ScaleLeft, scale_left
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scaled_gradients import (
    scaler_steps_on_scaled,
    scales_by_hand,
    steps_on_scaled,
)
from ampscope.control import BASELINE
from ampscope.observations import Call
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    latent,
    not_applicable,
    passed,
)


def check(evidence: Evidence) -> Verdict:
    """Found in the windows of the call log."""
    run = evidence.baseline
    if not any(c.name in ("scale", "scaler_step") and not c.nested for c in run.calls):
        left = scale_left(run, evidence.fp32)
        return not_applicable("No enabled scaler is used.") if left is None else _left(run, left)
    found = bypasses(run, lambda line: scales_by_hand(run, evidence.fp32, line))
    direct = [c for c in found.direct if not _unscaled_itself(evidence, found, c)]
    if direct:
        words = "calls optimizer.step() on gradients of a scaled loss"
        return _found(run, tuple(direct), words)
    unscaled = [c for c in found.unscaled if not _scaled_itself(evidence, found, c)]
    if unscaled:
        words = "steps through the scaler on gradients of a loss that was not scaled"
        return _found(run, tuple(unscaled), words)
    if (left := scale_left(run, evidence.fp32)) is not None:
        return _left(run, left)
    return passed("Every step went through the scaler, or on gradients without a scale.")


def _left(run: RunView, left: ScaleLeft) -> Verdict:
    """Found, or latent where the optimizer's step is no other for it."""
    more = f" and {len(left.parameters) - 1} more" if left.parameters[1:] else ""
    whose = f"{left.parameters[0]}{more}" if left.parameters else left.optimizer
    often = "" if abs(left.power) == 1 else f" to the power of {abs(left.power)}"
    what = "factor by which the script multiplies its loss" if left.by_hand else "loss scale"
    if left.power > 0:
        did, then = "times", "It was multiplied in once more than it was divided out."
        text = "Scale the loss once, and unscale the gradients before the step."
    else:
        did, then = "divided by", "It was divided out once more than it was multiplied in."
        text = "Divide the gradients by the loss scale once: scaler.step does it by itself."
    line = left.line or _line_of(run, left)
    at = f" Line {left.line} divides them." if left.line else ""
    reason = (
        f"The gradients of {whose} at the optimizer's step are those without a scale {did} the "
        f"{what} ({left.scale:,.6g}){often}. {then}{at}"
    )
    values = Measurement(
        "gradient norm at the step over that without a scale", left.ratio, 1.0, BASELINE, left.step
    )
    fix = Fix("scaler_protocol", text, PATCH)
    if not left.goes_on:
        hidden = " The optimizer divides by the size of its gradients, so its first step hides it."
        return latent(reason + hidden, fix, values)
    return Verdict(
        Status.FOUND,
        reason,
        step=left.step,
        line=line,
        evidence=(values,),
        fix=fix,
    )


def _line_of(run: RunView, left: ScaleLeft) -> str:
    """Of a scale too much the line that read it and made the loss of it, or else the backward pass;
    of one too few the last call that unscaled, the script's own or a scaler's, and of a division by
    hand the optimizer's step."""
    if left.power > 0:
        passes = [c for c in run.calls if c.name == "backward" and not c.nested]
        read = {c.line for c in run.calls if c.name == "get_scale" and not c.nested}
        own = [c.made_at for c in passes if c.made_at in read] + [c.line for c in passes]
        return next(filter(None, own), "")
    for name in ("unscale_", "scaler_step", "optimizer_step"):
        named = [c for c in run.calls if c.name == name and not c.nested and c.line]
        if named:
            first = [c for c in named if c.step <= left.step]
            return (first or named)[-1 if name == "unscale_" else 0].line
    return ""


def _unscaled_itself(evidence: Evidence, found: Bypasses, step: Call) -> bool:
    """The gradients carried no scale when the script's own step used them, and were finite: it
    called unscale_, divided by hand or in a hook. A step after the scaler's is none of these."""
    run = evidence.baseline
    own = [a for a in run.steps if a.optimizer == step.subject and not a.scaler]
    if step in found.again or any(a.grad_nonfinite for a in own):
        return False
    scaled = steps_on_scaled(run, evidence.fp32, step.subject)
    return step in found.after_unscale if scaled is None else not scaled


def _scaled_itself(evidence: Evidence, found: Bypasses, step: Call) -> bool:
    """No loss went through scaler.scale, and yet the gradients carried the scale. Where one of
    several losses did not, the norm of all says nothing."""
    if step in found.mixed:
        return False
    return scaler_steps_on_scaled(evidence.baseline, evidence.fp32, step.note) is True


def _found(run: RunView, calls: tuple[Call, ...], words: str) -> Verdict:
    first = calls[0]
    broken = next((a.step for a in run.steps if a.weight_nonfinite), None)
    harm = "" if broken is None else f" Non-finite gradients reached the weights at step {broken}."
    return Verdict(
        Status.FOUND,
        f"Line {first.line} {words}, {len(calls)} times.{harm}",
        step=first.step,
        line=first.line,
        evidence=(Measurement("steps past the protocol", len(calls), 0, BASELINE, first.step),),
        fix=Fix("scaler_protocol", "Step through the scaler only.", PATCH),
    )


PATCH = """scaler.scale(loss).backward()
scaler.step(optimizer)  # no optimizer.step() beside it
scaler.update()
"""


RULE = Rule(
    code="AMP016",
    id="scaler_bypassed",
    title="The scaler was bypassed",
    definition="A part of the protocol was left out: a direct optimizer.step, an unscaled loss, a "
    "partial unscale_.",
    check=check,
    needs=(BASELINE,),
    order=31,
    explains=(
        "gradient_underflow",
        "small_update_lost",
        "loss_scale_too_high",
        "not_amp_divergence",
        "activation_overflow",
        "elementwise_overflow",
        "reduction_overflow",
        "loss_magnitude_overflow",
        "log_zero_saturation",
    ),
)
