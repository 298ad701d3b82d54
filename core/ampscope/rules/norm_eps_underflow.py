"""An epsilon vanished in half precision and something was divided by zero.

What it detects
    A division, rsqrt or reciprocal whose denominator is exactly zero in half and not in fp32.

Why it matters
    1e-8 and 1e-12 round to zero in fp16, so the guard against division by zero is gone.

Blind spots
    A denominator that is zero in fp32 too is another fault.

Remedy
    An epsilon of at least 1e-4 in fp16, or the normalisation in fp32.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import ForwardClass, RootOp
from ampscope.control import BASELINE
from ampscope.rules.roots import forward_root
from ampscope.rules.verdict import Fix, Rule, Verdict, island, op_verdict, place


def check(evidence: Evidence) -> Verdict:
    """Found when the root op of what went wrong is of this class and fp32 does not share it."""
    found = forward_root(evidence, ForwardClass.EPS)
    if not isinstance(found, RootOp):
        return found
    op = found.op
    reason = f"{op.op} in {place(op)} divided by exactly 0: its epsilon vanished in {op.dtype}."
    controls = ("eps:0.0001", *island(op, "", "").controls)
    fix = Fix(
        "raise_eps",
        "Use an epsilon of 1e-4 or more, or normalise in fp32.",
        "eps = 1e-4\n",
        controls,
    )
    return op_verdict(found, reason, fix)


RULE = Rule(
    code="AMP008",
    id="norm_eps_underflow",
    title="An epsilon vanished in half precision",
    definition="A small constant rounds to zero or is absorbed, and the forward pass divides by "
    "zero.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=50,
    explains=("loss_scale_too_high", "gradient_underflow"),
    searches_modules=True,
)
