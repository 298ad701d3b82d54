"""An activation overflowed half precision.

What it detects
    A linear layer, convolution, addition or cast whose finite inputs gave infinity, while the
    same op on the same inputs is finite in fp32, and the infinity reached the loss, a gradient
    or the evaluation.

Why it matters
    Every number after it is NaN, whatever the loss scale: GradScaler skips every step and
    halves its scale towards zero.

Blind spots
    An overflow that ops in place or recomputed layers turn back into finite numbers is seen only
    when it recurs.

Remedy
    Keep the module in fp32, use bf16, or make its inputs or weights smaller.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import ForwardClass, RootOp
from ampscope.control import BASELINE
from ampscope.rules.roots import forward_root
from ampscope.rules.verdict import Rule, Verdict, island, op_verdict, place


def check(evidence: Evidence) -> Verdict:
    """Found when the root op of what went wrong is of this class and fp32 does not share it."""
    found = forward_root(evidence, ForwardClass.ACTIVATION)
    if not isinstance(found, RootOp):
        return found
    op = found.op
    reason = (
        f"{op.op} in {place(op)} gave infinity in {op.dtype}; the same inputs give"
        f" {op.fp32_max:,.6g} in fp32."
        if op.fp32_max is not None
        else f"{op.op} in {place(op)} gave infinity."
    )
    fix = island(op, "fp32_module", f"Keep {op.module or 'this expression'} in fp32.")
    return op_verdict(found, reason, fix)


RULE = Rule(
    code="AMP001",
    id="activation_overflow",
    title="An activation overflowed",
    definition="A linear, convolution, residual addition or cast has a result beyond the format's "
    "largest number.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=50,
    explains=("loss_scale_too_high", "gradient_underflow"),
    searches_modules=True,
)
