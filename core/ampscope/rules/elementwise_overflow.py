"""An element-wise op overflowed half precision.

What it detects
    A square, exponential, product or quotient with finite inputs and an infinite result in
    half; or a root or arc cosine of what rounding has put outside of its domain. Where a later op
    makes a finite number of the infinity, its result is compared with fp32's: latent while the
    training keeps up with fp32.

Why it matters
    The infinity becomes NaN, or worse: rsqrt turns it into zero, and the layer silently stops
    learning with no NaN anywhere.

Blind spots
    Where nothing non-finite arrives and the way back to finite numbers was not followed (ops in
    place, recomputed layers), only an intervention distinguishes a fault from a harmless infinity.

Remedy
    Compute that expression in fp32 (x.float()), or rescale it.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import ForwardClass, RootOp
from ampscope.control import BASELINE
from ampscope.rules.roots import forward_root, leaves_domain
from ampscope.rules.verdict import Rule, Verdict, island, op_verdict, place


def check(evidence: Evidence) -> Verdict:
    """Found when the root op of what went wrong is of this class and fp32 does not share it."""
    found = forward_root(evidence, ForwardClass.ELEMENTWISE)
    if not isinstance(found, RootOp):
        return found
    op = found.op
    is_silent = found.arrives == "nowhere" and op.lost is None
    silent = " It becomes finite further on: no NaN shows." if is_silent else ""
    reason = f"{op.op} in {place(op)} overflowed {op.dtype}.{silent}"
    if leaves_domain(op):
        reason = (
            f"{op.op} in {place(op)} gave NaN: what went in was rounded to {op.dtype}, and lies"
            " where the function has no value."
        )
    return op_verdict(found, reason, island(op, "fp32_module", "Compute this expression in fp32."))


RULE = Rule(
    code="AMP005",
    id="elementwise_overflow",
    title="An element-wise op overflowed",
    definition="A square, cube, exponential, product or quotient exceeds the format's largest "
    "number.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=50,
    explains=("loss_scale_too_high", "gradient_underflow"),
    searches_modules=True,
)
