"""The loss is so large that its gradients overflow at scale 1.

What it detects
    A finite loss whose steps are skipped until the scale has fallen below 1, where a step is taken;
    or gradients that overflow in the backward pass without any scale; fp32 trains.

Why it matters
    A summed loss grows with the batch and with resolution; half precision ends at 65,504.

Blind spots
    A single gigantic gradient in one layer looks the same; the named module shows which it is.

Remedy
    Average the loss (reduction='mean'), or divide it by a constant.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.hand_casts import hand_casts
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scale_facts import (
    ScaleFacts,
    fails_forward,
    part_of_the_loss,
    scale_facts,
    static_scale,
)
from ampscope.control import BASELINE
from ampscope.rules.backward_roots import is_overflow
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    inconclusive,
    not_applicable,
    passed,
    place,
)

LARGE = 1e3  # a mean loss of classification or regression is of the order of 1


def check(evidence: Evidence) -> Verdict:
    """Found when steps are taken at a scale below 1 alone, or gradients overflow without one."""
    run, fp32 = evidence.baseline, evidence.fp32
    if fails_forward(evidence):
        return passed("The loss itself is not finite.")
    if fp32 is None:
        return inconclusive("Without the fp32 control the gradients may be infinite there too.")
    if fp32.bad_gradient_steps or evidence.fp32_fails:
        return passed("fp32 fails as well.")
    largest = max((a.grad_max or 0.0 for a in fp32.steps), default=0.0)
    loss = fp32.head_loss or 0.0
    facts = scale_facts(run)
    if facts is not None:
        return _not_below_1(run, facts) or _found(
            evidence,
            loss,
            f"takes a loss scale of {facts.last:.3g} to be finite, after {facts.skipped} skipped"
            " steps",
            _measured(loss, largest, Measurement("scale at the end", facts.last, 1.0, BASELINE)),
        )
    root = evidence.root
    if root is None or not evidence.symptoms or not is_overflow(root):
        return not_applicable("No gradient overflowed.")
    factor = part_of_the_loss(evidence)
    loss *= factor or 1.0  # what the calls hold is divided by it
    is_scaled = static_scale(run) is not None and factor is None
    if is_scaled or max(abs(loss), largest) < LARGE:
        return passed("The loss is of ordinary size.")
    what = f"overflows in the backward pass at {place(root.op)}"
    if factor is not None:
        what += f"; it is multiplied by {factor:,.6g}, and nothing divides the gradients by it"
    return _found(evidence, loss, what, _measured(loss, largest))


def _not_below_1(run: RunView, facts: ScaleFacts) -> Verdict | None:
    """Why the scaler's course does not speak of the loss; None where it does."""
    if facts.last >= 1 or facts.largest_taken is None or not facts.skipped:
        return passed("Steps are taken at a scale of 1 or more.")
    if not any(a.scaler and not a.skipped and a.scale < 1 for a in run.steps):
        return passed("No step is taken below a scale of 1 either: look at the backward pass.")
    return None


def _measured(loss: float, largest: float, *more: Measurement) -> tuple[Measurement, ...]:
    return (
        Measurement("loss in fp32", loss, LARGE, "fp32", 0),
        Measurement("largest gradient in fp32", largest, None, "fp32"),
        *more,
    )


def _found(
    evidence: Evidence, loss: float, what: str, measured: tuple[Measurement, ...]
) -> Verdict:
    """``what`` the loss does, as the rest of a sentence. The root op is named where the loss itself
    is made at its line, or its line is not known."""
    run, root = evidence.baseline, evidence.root
    made_at = next((c.made_at for c in run.calls if c.name == "backward" and c.made_at), "")
    op = root.op if root is not None and root.op.phase == "backward" else None
    if op is not None and made_at not in ("", op.line):
        op = None  # the gradient overflows elsewhere
    or_bf16 = "" if evidence.emulates_bf16 or hand_casts(run) else ", or use bf16"
    return Verdict(
        Status.FOUND,
        f"The loss is about {loss:,.6g} and {what}.",
        module=op.module or None if op else None,
        op=op.op if op else None,
        phase="backward",
        step=run.first_bad_step,
        line=made_at or (op.line if op else ""),
        evidence=measured,
        fix=Fix(
            "rewrite_op",
            f"Average the loss instead of summing it{or_bf16}.",
            "loss = criterion(output, target)  # reduction='mean'\n",
            ("bf16",),
        ),
    )


RULE = Rule(
    code="AMP014",
    id="loss_magnitude_overflow",
    title="The loss itself is too large",
    definition="Loss or gradients are so large that a scale below 1 would be needed.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=59,
    explains=("loss_scale_too_high",),
)
