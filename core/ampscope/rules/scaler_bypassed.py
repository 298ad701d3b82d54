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

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.observations import Call
from ampscope.analysis.call_windows import windows
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, not_applicable, passed


def check(evidence: Evidence) -> Verdict:
    """Found in the windows of the call log."""
    run = evidence.as_is
    if not any(c.name in ("scale", "scaler_step") and not c.nested for c in run.calls):
        return not_applicable("No enabled scaler is used.")
    direct: list[Call] = []
    unscaled: list[Call] = []
    last_scaled: dict[str, bool] = {}
    alone = len({w.optimizer for w in windows(run)}) == 1
    for window in windows(run):
        step, backwards = window.calls[-1], window.backwards
        if backwards:
            # With several optimizers the last backward before a step is the one that is meant.
            last_scaled[window.optimizer] = backwards[-1].scaled
        if step.name == "optimizer_step" and last_scaled.get(window.optimizer):
            direct.append(step)
        elif step.name == "scaler_step" and backwards:
            mixed = alone and any(not c.scaled for c in backwards)
            if mixed or not backwards[-1].scaled:
                unscaled.append(step)
    if direct:
        return _found(
            run, direct, "calls optimizer.step() on gradients of a scaled loss", direct[0]
        )
    if unscaled:
        return _found(
            run,
            unscaled,
            "steps through the scaler on gradients of a loss that was not scaled",
            unscaled[0],
        )
    return passed("Every step went through the scaler.")


def _found(run: RunView, calls: list[Call], words: str, first: Call) -> Verdict:
    broken = next((a.attempt for a in run.attempts if a.weight_nonfinite), None)
    return Verdict(
        Status.FOUND,
        f"Line {first.line} {words}, {len(calls)} times."
        + (
            f" Non-finite gradients reached the weights at step {broken}."
            if broken is not None
            else ""
        ),
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
