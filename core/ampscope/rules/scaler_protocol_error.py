"""GradScaler's methods were called out of order.

What it detects
    GradScaler's own exception about unscale_, step or update.

Why it matters
    The state machine protects gradients from being divided twice.

Blind spots
    A protocol error that raises nothing is the business of other rules.

Remedy
    Call scale, unscale_ (once, if at all), step and update once each an optimizer step.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.control import BASELINE
from ampscope.rules.verdict import Fix, Rule, Verdict, error_verdict, passed

_TEXTS = (
    "unscale_() has already been called",
    "step() has already been called",
    "unscale_() is being called after step()",
    "No inf checks were recorded",
    "_scale is None",
    "_growth_tracker is None",
)


def check(evidence: Evidence) -> Verdict:
    """Found by the text of the exception."""
    text = evidence.baseline.outcome.error_text
    if not any(part in text for part in _TEXTS):
        return passed("GradScaler raised nothing.")
    return error_verdict(evidence, Fix("scaler_protocol", TEXT, PATCH))


TEXT = "Call unscale_, step and update once each an optimizer step, not in every micro-batch."
PATCH = """scaler.scale(loss / accumulate).backward()
if (i + 1) % accumulate == 0:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


RULE = Rule(
    code="AMP017",
    id="scaler_protocol_error",
    title="The scaler was called out of order",
    definition="GradScaler's state machine raised: unscale_ twice, step twice, update without "
    "step.",
    check=check,
    needs=(BASELINE,),
    order=10,
)
