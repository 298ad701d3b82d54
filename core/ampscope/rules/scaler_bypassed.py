"""A part of the scaler's protocol was left out.

What it detects
    An optimizer.step that the script calls itself on gradients of a scaled loss, also after
    scaler.step; or scaler.step on gradients of a loss that was not scaled.

Why it matters
    Gradients that are not finite reach the weights, or every update is 65,536 times too large
    or small.

Blind spots
    Which method was called decides nothing where the fp32 control shows whether gradients carry the
    scale when they are used. At scales below 16 it cannot, and the calls decide.

Remedy
    Use scale, step and update once each, and nothing beside them.
"""

from __future__ import annotations

from ampscope.analysis.call_windows import Bypasses, bypasses
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scaled_gradients import (
    scaler_steps_on_scaled,
    scales_by_hand,
    steps_on_scaled,
)
from ampscope.control import BASELINE
from ampscope.observations import Call
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, not_applicable, passed


def check(evidence: Evidence) -> Verdict:
    """Found in the windows of the call log."""
    run = evidence.baseline
    if not any(c.name in ("scale", "scaler_step") and not c.nested for c in run.calls):
        return not_applicable("No enabled scaler is used.")
    found = bypasses(run, lambda line: scales_by_hand(run, evidence.fp32, line))
    direct = [c for c in found.direct if not _unscaled_itself(evidence, found, c)]
    if direct:
        words = "calls optimizer.step() on gradients of a scaled loss"
        return _found(run, tuple(direct), words)
    unscaled = [c for c in found.unscaled if not _scaled_itself(evidence, found, c)]
    if unscaled:
        words = "steps through the scaler on gradients of a loss that was not scaled"
        return _found(run, tuple(unscaled), words)
    return passed("Every step went through the scaler, or on gradients without a scale.")


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
