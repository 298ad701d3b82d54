"""Two losses share one scaler, and one of them drags the scale down.

What it detects
    One scaler, several optimizers; one keeps overflowing, the others never do, and the scale
    falls by a factor of a thousand or more, until another one's gradients turn to zero or the
    scale is below 1.

Why it matters
    The loss that is well behaved loses its gradients to underflow.

Blind spots
    A single optimizer with two losses.

Remedy
    One scaler for each optimizer, and a cure for the loss that overflows.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, not_applicable, passed

OFTEN = 0.1  # of an optimizer's steps
FALL = 2.0**10
LOST = 0.05  # of the victim's gradient entries, above those that were zero at the first scale


def check(evidence: Evidence) -> Verdict:
    """Found from the steps of each optimizer."""
    run = evidence.baseline
    own = [a for a in run.steps if a.scaler]
    names = sorted({a.optimizer for a in own})
    if len(names) < 2 or len({a.scaler for a in own}) != 1:
        return not_applicable("No scaler is shared by several optimizers.")
    bad = {n: [a for a in own if a.optimizer == n and a.grad_nonfinite] for n in names}
    count = {n: sum(a.optimizer == n for a in own) for n in names}
    culprits = [n for n in names if len(bad[n]) > OFTEN * count[n]]
    victims = [n for n in names if not bad[n]]
    if not culprits or not victims:
        return passed("No optimizer drags the common scale down.")
    culprit, victim = culprits[0], victims[0]
    # One that was stepped before another took its place, as in a second phase, suffers nothing.
    lowest = min(a.scale for a in own if a.optimizer == victim)
    fall = own[0].scale / lowest if lowest else float("inf")
    if fall < FALL:
        return passed("No optimizer drags the common scale down.")
    seen = [a for a in own if a.optimizer == victim and a.grad_total]
    shares = [a.grad_zero / a.grad_total for a in seen] or [0.0]
    zero = shares[-1]
    if zero - shares[0] < LOST and lowest >= 1:
        return passed(f"The scale falls as in a search, and {victim} loses no gradient by it.")
    return Verdict(
        Status.FOUND,
        f"{culprit} overflows in {len(bad[culprit])} of {count[culprit]} steps and takes the shared"
        f" scale from {own[0].scale:,.6g} to {lowest:.3g}; {victim} never"
        f" overflows and ends with {zero:.1%} zero gradients.",
        step=bad[culprit][0].step,
        evidence=(
            Measurement(
                f"overflowing steps of {culprit}",
                len(bad[culprit]),
                OFTEN * count[culprit],
                BASELINE,
            ),
            Measurement(f"overflowing steps of {victim}", 0, 0, BASELINE),
            Measurement("fall of the shared scale", fall, FALL, BASELINE),
            Measurement(f"zero gradients of {victim} at the end", zero, None, BASELINE),
        ),
        fix=Fix(
            "separate_scalers",
            "Give each optimizer a scaler of its own.",
            PATCH,
            ("separate_scalers",),
        ),
    )


def is_removed(before: RunView, after: RunView) -> bool:
    """Whether the optimizers that never overflowed have gradients again; the other one's fault
    remains."""
    victims = {a.optimizer for a in before.steps} - {
        a.optimizer for a in before.steps if a.grad_nonfinite
    }
    shares = [_last_zero_share(run, victims) for run in (before, after)]
    return bool(victims) and shares[1] < 0.5 * shares[0]


def _last_zero_share(run: RunView, optimizers: set[str]) -> float:
    own = [a for a in run.steps if a.optimizer in optimizers and a.grad_total][-5:]
    total = sum(a.grad_total for a in own)
    return sum(a.grad_zero for a in own) / total if total else 0.0


PATCH = """scaler_d, scaler_g = torch.amp.GradScaler(device), torch.amp.GradScaler(device)
"""


RULE = Rule(
    code="AMP019",
    id="shared_scaler_interference",
    title="Two losses share one scaler",
    definition="One loss or optimizer drags down the scale that another one needs.",
    check=check,
    needs=(BASELINE,),
    order=33,
    explains=("loss_magnitude_overflow", "loss_scale_too_high", "gradient_underflow"),
    is_removed=is_removed,
    leaves_symptoms=True,
)
