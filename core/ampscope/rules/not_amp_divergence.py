"""Training diverges, and AMP has nothing to do with it.

What it detects
    The fp32 control grows without bound or ends in NaN, no later than the script as it is, and
    neither its data nor a formula explains it.

Why it matters
    AMP can even hide it: with a learning rate that takes fp32 to NaN, GradScaler skips nearly
    every step.

Blind spots
    A control that diverges for a reason of its own.

Remedy
    A lower learning rate, warm-up, or clipping; for recurrences a gate or a normalisation.
"""

from __future__ import annotations

import math

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, inconclusive, passed

GROWTH = 10.0  # the loss, or the gradients, grew tenfold before they broke
EARLY = (0, 1)  # attempts at which only a growth within the step, over time-steps, can break fp32


def check(evidence: Evidence) -> Verdict:
    """Found when fp32 diverges by growth and not by one bad value."""
    fp32 = evidence.fp32
    if fp32 is None:
        return inconclusive("Without the fp32 control this cannot be told.")
    if not evidence.fp32_symptoms & {
        Symptom.LOSS,
        Symptom.WEIGHTS,
        Symptom.DIVERGED,
        Symptom.GRADIENTS,
    }:
        return passed("fp32 trains: whatever is wrong has to do with precision.")
    growth = _growth(fp32)
    if growth < GROWTH:
        return inconclusive("fp32 fails, but not by growing; look at the other findings.")
    bad = fp32.first_bad_attempt
    own = min(evidence.as_is.bad_loss_attempts, default=None)
    if own is not None and bad not in EARLY and _growth(fp32, own) < GROWTH:
        return passed(f"Half precision breaks at step {own}, before fp32 has grown.")
    lr = fp32.attempts[0].lr if fp32.attempts else 0.0
    return Verdict(
        Status.FOUND,
        "AMP is innocent: the fp32 control diverges too"
        + (f", at step {bad}" if bad is not None else "")
        + f". Its loss or gradients grew by a factor of {growth:.3g}; the learning rate is {lr:g}.",
        step=bad if bad is not None else fp32.attempts[-1].attempt if fp32.attempts else None,
        evidence=(
            Measurement("growth of loss or gradient norm in fp32", growth, GROWTH, "fp32", bad),
            Measurement("skipped steps as it is", len(evidence.as_is.skips), None, "as_is"),
        ),
        fix=Fix(
            "lower_lr",
            "Lower the learning rate, or warm it up; clip the gradients.",
            PATCH,
            ("lr:0.1", "lr:0.01", "lr:0.001"),
        ),
    )


PATCH = "optimizer = torch.optim.SGD(model.parameters(), lr=lr / 10)\n"


def _growth(run: RunView, until: int | None = None) -> float:
    """Largest finite loss or gradient norm up to step ``until`` over the first one."""
    grown = [1.0]
    seen = [a for a in run.attempts if until is None or a.attempt <= until]
    for series in ([a.loss for a in seen], [a.grad_norm for a in seen]):
        finite = [abs(x) for x in series if x is not None and math.isfinite(x)]
        if len(finite) > 1 and finite[0] > 0:
            grown.append(max(finite) / finite[0])
    overflow_in_time = any(b.dtype == "fp32" and (b.fp32_max or 0) > 1e30 for b in run.bad_ops)
    early = run.first_bad_attempt in EARLY
    return max(*grown, 1e6 if early and overflow_in_time else 1.0)


RULE = Rule(
    "not_amp_divergence",
    check,
    ("as_is", "fp32"),
    40,
    explains=(
        "loss_scale_too_high",
        "loss_magnitude_overflow",
        "activation_overflow",
        "elementwise_overflow",
        "reduction_overflow",
        "gradient_underflow",
        "batchnorm_stats_corrupted",
        "attention_logit_overflow",
        "singular_gradient",
    ),
)
