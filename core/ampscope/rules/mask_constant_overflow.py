"""A mask constant does not fit half precision.

What it detects
    A finite constant such as -1e9 or finfo(float32).min that becomes infinite when it meets a
    half tensor; or the exception that torch raises for it.

Why it matters
    A row that is masked completely then gives NaN instead of a uniform distribution.

Blind spots
    A constant that is cast to infinity without harm is not reported.

Remedy
    masked_fill as the last change of the scores, with -1e4: fp16 holds it, sums with it as well,
    and exp(-1e4) is 0. torch.finfo(scores.dtype).min becomes -inf where something negative is added
    to it, and a mask with -inf gives NaN in a row that is masked completely.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import ForwardClass, RootOp
from ampscope.control import BASELINE, Control
from ampscope.rules.roots import forward_root
from ampscope.rules.verdict import Fix, Rule, Verdict, error_verdict, island, op_verdict, place

TEXT = (
    "Apply the mask last, by masked_fill, and fill with -1e4: fp16 holds it, with room for sums, "
    "and its exponential is 0. Not torch.finfo(scores.dtype).min where anything is added to it, "
    "which makes it -inf; and not -inf, which gives NaN where a row is masked completely."
)
PATCH = "scores = scores.masked_fill(mask, -1e4)  # behind every other sum\n"


def check(evidence: Evidence) -> Verdict:
    """Found by torch's own error, or by a root op that made a constant infinite."""
    outcome = evidence.baseline.outcome
    if "cannot be converted to type" in outcome.error_text and "overflow" in outcome.error_text:
        places = (("fp32_lines", outcome.error_line), ("fp32_modules", outcome.error_module))
        controls = tuple(Control.of(**{name: where}) for name, where in places if where)
        return error_verdict(evidence, Fix("rewrite_op", TEXT, PATCH, controls))
    found = forward_root(evidence, ForwardClass.MASK)
    if not isinstance(found, RootOp):
        return found
    op = found.op
    largest = "" if op.fp32_max is None else f" of magnitude {op.fp32_max:g}"
    constant = f"The constant {min(op.scalars):g}" if op.scalars else f"A constant{largest}"
    reason = f"{constant} of {place(op)} does not fit {op.dtype}."
    fix = Fix("rewrite_op", TEXT, PATCH, island(op, "", "").controls)
    return op_verdict(found, reason, fix)


RULE = Rule(
    code="AMP003",
    id="mask_constant_overflow",
    title="A mask constant does not fit",
    definition="A finite fp32 mask constant is not representable in half precision.",
    check=check,
    needs=(BASELINE, "fp32"),
    order=50,
    explains=("loss_scale_too_high", "gradient_underflow"),
)
