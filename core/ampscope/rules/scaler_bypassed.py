"""A part of the scaler's protocol was left out.

What it detects
    An optimizer.step that the script calls itself on gradients of a scaled loss, also after
    scaler.step; or scaler.step on gradients of a loss that was not scaled.

Why it matters
    Gradients that are not finite reach the weights, or every update is 65,536 times too large
    or small.

Blind spots
    A loss that is scaled by hand.

Remedy
    Use scale, step and update once each, and nothing beside them.
"""

from __future__ import annotations

from ampscope.analysis.call_windows import bypasses
from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.observations import Call
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, not_applicable, passed


def check(evidence: Evidence) -> Verdict:
    """Found in the windows of the call log."""
    run = evidence.as_is
    if not any(c.name in ("scale", "scaler_step") and not c.nested for c in run.calls):
        return not_applicable("No enabled scaler is used.")
    found = bypasses(run)
    if found.direct:
        words = "calls optimizer.step() on gradients of a scaled loss"
        return _found(run, found.direct, words)
    if found.unscaled:
        words = "steps through the scaler on gradients of a loss that was not scaled"
        return _found(run, found.unscaled, words)
    return passed("Every step went through the scaler.")


def _found(run: RunView, calls: tuple[Call, ...], words: str) -> Verdict:
    first = calls[0]
    broken = next((a.attempt for a in run.attempts if a.weight_nonfinite), None)
    harm = "" if broken is None else f" Non-finite gradients reached the weights at step {broken}."
    return Verdict(
        Status.FOUND,
        f"Line {first.line} {words}, {len(calls)} times.{harm}",
        step=first.attempt,
        line=first.line,
        evidence=(Measurement("steps past the protocol", len(calls), 0, "as_is", first.attempt),),
        fix=Fix("scaler_protocol", "Step through the scaler only.", PATCH),
    )


PATCH = """scaler.scale(loss).backward()
scaler.step(optimizer)  # no optimizer.step() beside it
scaler.update()
"""


RULE = Rule(
    "scaler_bypassed",
    check,
    ("as_is",),
    31,
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
