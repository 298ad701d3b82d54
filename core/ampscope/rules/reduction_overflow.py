"""A reduction overflowed half precision.

What it detects
    A sum, mean, variance or norm that is infinite although its inputs are far inside the range;
    also where a division by it gives a finite number that is not fp32's.

Why it matters
    Losses that sum over pixels or tokens pass 65,504 with ordinary values.

Blind spots
    On CUDA autocast runs sum and norm in fp32, so a native CPU run can differ.

Remedy
    Reduce in fp32: x.sum(dtype=torch.float32), or take the mean first.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import ForwardClass, RootOp
from ampscope.control import BASELINE
from ampscope.rules.roots import forward_root
from ampscope.rules.verdict import Rule, Verdict, island, op_verdict, place


def check(evidence: Evidence) -> Verdict:
    """Found when the root op of what went wrong is of this class and fp32 does not share it."""
    found = forward_root(evidence, ForwardClass.REDUCTION)
    if not isinstance(found, RootOp):
        return found
    op = found.op
    largest = max((o.max_abs or 0.0 for o in op.inputs), default=0.0)
    reason = (
        f"{op.op} in {place(op)} overflowed {op.dtype} although its largest input is"
        f" {largest:,.6g}."
    )
    return op_verdict(
        found,
        reason,
        island(
            op,
            "rewrite_op" if not op.module else "fp32_module",
            "Reduce in fp32 (dtype=torch.float32).",
        ),
    )


RULE = Rule(
    code="AMP006",
    id="reduction_overflow",
    title="A reduction overflowed",
    definition="A sum, mean, variance or norm exceeds the range although its inputs are small.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=50,
    explains=("loss_scale_too_high", "gradient_underflow"),
    searches_modules=True,
)
