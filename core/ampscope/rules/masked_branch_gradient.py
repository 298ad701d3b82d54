"""The branch that was not taken sent back NaN.

What it detects
    A non-finite value that where, a mask, a clamp or an index discarded in the forward pass, and
    NaN gradients with a finite loss.

Why it matters
    The gradient of the discarded branch is zero times infinity, which is NaN.

Blind spots
    A branch that is discarded by multiplication with a mask.

Remedy
    Make the input of the branch safe before the branch: the double where.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.singular import has_no_value
from ampscope.control import BASELINE, Control
from ampscope.rules.backward_roots import (
    SELECTS,
    backward_root,
    is_discarded_branch,
    is_overflow,
    remedy,
)
from ampscope.rules.verdict import Fix, Rule, Verdict, op_verdict, passed


def check(evidence: Evidence) -> Verdict:
    """Found when a discarded branch is the root of a gradient's NaN."""
    root = backward_root(evidence)
    if root is None or not is_discarded_branch(evidence, root):
        return passed("No discarded branch sent back NaN.")
    if is_overflow(root):
        return passed("The gradient overflowed.")
    op = root.op
    shared = evidence.fp32_fails
    words = "in fp32 as well" if shared else "in half precision only, where it overflows earlier"
    return op_verdict(
        root,
        f"The branch at line {op.line} is not finite where it is not taken ({words}); the loss"
        " leaves it out and is finite, and its gradient is 0 times infinity.",
        Fix(
            "rewrite_op",
            *(remedy(op) if has_no_value(op) and not SELECTS & {*op.consumers} else (TEXT, PATCH)),
            () if shared else (Control.of(fp32_lines=op.line),),
        ),
    )


TEXT = "Make the argument safe before the branch."
PATCH = """safe = torch.where(taken, x, torch.zeros_like(x))  # harmless where it is not taken
y = torch.where(taken, torch.exp(safe), other)
"""


RULE = Rule(
    code="AMP010",
    id="masked_branch_gradient",
    title="The branch that was not taken sent back NaN",
    definition="The discarded branch of where or clamp multiplies zero by infinity in the backward "
    "pass.",
    check=check,
    needs=(BASELINE, "fp32"),
    order=44,
    explains=(
        "loss_scale_too_high",
        "singular_gradient",
        "elementwise_overflow",
        "loss_magnitude_overflow",
    ),
)
