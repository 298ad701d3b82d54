"""The logarithm of a probability that rounded to 0 or 1.

What it detects
    A logarithm with an input of exactly zero that a squashing function (sigmoid, softmax, 1 -
    p) made, where fp32 has a value above zero.

Why it matters
    log(0) is minus infinity, and its gradient too.

Blind spots
    A zero that fp32 has as well is a bug of the formula, not of half precision.

Remedy
    Use the logits form (binary_cross_entropy_with_logits, log_softmax, logsigmoid), or fp32.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import ForwardClass, RootOp
from ampscope.control import BASELINE
from ampscope.rules.roots import forward_root
from ampscope.rules.verdict import Rule, Verdict, island, op_verdict, place


def check(evidence: Evidence) -> Verdict:
    """Found when the root op of what went wrong is of this class and fp32 does not share it."""
    found = forward_root(evidence, ForwardClass.LOG_ZERO)
    if not isinstance(found, RootOp):
        return found
    op = found.op
    reason = (
        f"{op.op} in {place(op)} met an input of exactly 0, a probability that saturated in half."
    )
    text = "Use the logits form of the loss (logsigmoid, log_softmax), or compute it in fp32."
    return op_verdict(
        found,
        reason,
        island(
            op, "rewrite_op", text, "F.logsigmoid(x)  # instead of torch.log(torch.sigmoid(x))\n"
        ),
    )


RULE = Rule(
    code="AMP007",
    id="log_zero_saturation",
    title="A logarithm of a saturated probability",
    definition="A probability rounded to exactly 0 or 1 before its logarithm was taken.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=50,
    explains=("loss_scale_too_high", "gradient_underflow"),
    searches_modules=True,
)
