"""The optimizer's state leaves the range of half precision.

What it detects
    Optimizer state in half, finite gradients, and then weights that are not finite, steps far
    larger than in fp32, or second moments that vanished; an epsilon that rounds to zero.

Why it matters
    Adam divides by sqrt(v) + eps; in fp16 both can be zero.

Blind spots
    State kept by code of the script's own.

Remedy
    fp32 parameters (and so fp32 state), or an epsilon of 1e-4.
"""

from __future__ import annotations

import math

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom
from ampscope.formats import FORMATS
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    inconclusive,
    not_applicable,
    passed,
)

TOO_LARGE = 10.0  # update norm over the fp32 control's, in the first steps
MOSTLY_DEAD = 0.5  # below that, updates that are too small are the simpler reason to stand still
DEAD = 0.01  # share of entries whose second moment vanished while the first did not


def check(evidence: Evidence) -> Verdict:
    """Found at the first steps, where both runs still have the same weights."""
    run, fp32 = evidence.as_is, evidence.fp32
    half = [a for a in run.attempts if "fp16" in a.state_dtypes or "bf16" in a.state_dtypes]
    if not half:
        return not_applicable("No optimizer keeps its state in half precision.")
    broken = next(
        (a for a in half if (a.weight_nonfinite or a.state_nonfinite) and not a.grad_nonfinite),
        None,
    )
    if broken is None and not evidence.symptoms:
        return passed("Training with half-precision state went well.")
    first = half[0]
    eps_lost = (
        first.eps is not None
        and first.eps < FORMATS["fp16"].min_subnormal / 2
        and "fp16" in first.state_dtypes
    )
    dead = max((a.state_zero_share or 0.0 for a in half), default=0.0)
    ratio = _ratio(run, fp32)
    exploded = ratio is not None and ratio > TOO_LARGE
    frozen = dead > MOSTLY_DEAD and Symptom.FROZEN in evidence.symptoms
    if broken is None and not exploded and not frozen:
        return passed("Steps are as large as in fp32.")
    if fp32 is not None and evidence.fp32_fails_first:
        return inconclusive("fp32 fails as early.")
    what = (
        f"{'the weights' if broken.weight_nonfinite else 'its moments'} are not finite after step "
        f"{broken.attempt} although its gradients are"
        if broken is not None
        else (
            f"its steps are {ratio:,.3g} times those of fp32"
            if exploded
            else f"{dead:.1%} of its second moments vanished"
        )
    )
    eps = f"; eps = {first.eps:g} is 0 in fp16" if eps_lost else ""
    return Verdict(
        Status.FOUND,
        f"The state of {first.optimizer} is {first.state_dtypes}: {what}{eps}.",
        phase="step",
        step=broken.attempt if broken is not None else first.attempt,
        evidence=(
            Measurement("dtype of the state", first.state_dtypes, "fp32", "as_is", first.attempt),
            Measurement("second moments that vanished", dead, DEAD, "as_is"),
            *(
                (Measurement("eps", first.eps, FORMATS["fp16"].min_subnormal, "as_is"),)
                if first.eps is not None
                else ()
            ),
            *(
                (Measurement("update norm over fp32's", ratio, TOO_LARGE, "as_is"),)
                if ratio is not None
                else ()
            ),
        ),
        fix=Fix(
            "fp32_optimizer_state",
            "Keep parameters and state in fp32; or use eps=1e-4.",
            PATCH,
            ("fp32_state", "fp32_params", "eps:0.0001"),
        ),
    )


PATCH = (
    "optimizer = torch.optim.Adam(model.float().parameters(), lr=lr)  # and autocast for the"
    " forward\n"
)


def _ratio(run: RunView, fp32: RunView | None) -> float | None:
    if fp32 is None:
        return None
    pairs = [
        a.update_norm / b.update_norm
        for a, b in zip(run.attempts[:3], fp32.attempts[:3], strict=False)
        if a.update_norm and b.update_norm and math.isfinite(a.update_norm)
    ]
    return max(pairs) if pairs else None


RULE = Rule(
    "optimizer_state_range",
    check,
    ("as_is", "fp32"),
    38,
    explains=(
        "small_update_lost",
        "activation_overflow",
        "elementwise_overflow",
        "reduction_overflow",
        "gradient_underflow",
        "loss_magnitude_overflow",
        "log_zero_saturation",
        "norm_eps_underflow",
    ),
)
