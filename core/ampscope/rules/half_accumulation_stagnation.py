"""A long sum in half precision stagnates.

What it detects
    A half-precision sum, gradient of repeated indices or running total that stays as it is
    although its terms are not zero, or that is far from the fp32 result of the same inputs.

Why it matters
    fp16 stops counting at 2,048 and bf16 at 256; what is added after that is lost.

Blind spots
    Sums in code that does not go through torch.

Remedy
    Accumulate in fp32.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.half_sums import MIN_STAGNATED, worst_sum
from ampscope.control import BASELINE, Control
from ampscope.observations import INACCURATE_ERROR, BadOp
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    island,
    magnitudes,
    passed,
    place,
)

MOST_MADE = 3  # lines that make tensors in half, lifted with the sum's


def check(evidence: Evidence) -> Verdict:
    """Found from stagnated additions and from results far from fp32's, at the op itself."""
    op = worst_sum(evidence.baseline)
    if op is None:
        return passed("No sum in half precision stagnates.")
    root = evidence.root
    if op.kind == "drift" and root is not None and root.op.line == op.line:
        return passed(f"The sum at line {op.line} overflows; what it rounds off before is less.")
    if root is not None and (root.op.step, root.op.id) < (op.step, op.id):
        return passed(f"{root.op.op} at line {root.op.line} lost its numbers first.")
    reason, value = _seen(op)
    return Verdict(
        Status.FOUND,
        reason,
        module=op.module or None,
        op=op.op,
        phase=op.phase,
        step=op.step,
        line=op.line,
        code=op.code,
        evidence=(value, *magnitudes(op)),
        fix=Fix(
            "rewrite_op",
            "Accumulate in fp32.",
            "total = torch.zeros((), dtype=torch.float32)\n",
            (*_with_the_total(evidence, op), *island(op, "", "").controls),
        ),
    )


def _with_the_total(evidence: Evidence, op: BadOp) -> tuple[str, ...]:
    """The line together with those that make tensors in its dtype: a total that lives in half
    rounds each sum again, in whatever precision that was computed."""
    if op.kind not in ("drift", "stall") or not op.line:
        return ()
    made = (s.line for s in evidence.baseline.sites if s.kind == "made" and s.dtype == op.dtype)
    lines = [*dict.fromkeys(line for line in made if line not in ("", op.line))]
    return (Control.of(fp32_lines=(op.line, *lines[:MOST_MADE])),) if lines else ()


def _seen(op: BadOp) -> tuple[str, Measurement]:
    """The sentence and the number, by the way in which the sum was seen to be off."""
    error = op.error or 0.0
    if op.kind == "coarse":
        return (
            f"{op.op} in {place(op)} is {error:.0%} away from the fp32 result of the same inputs.",
            Measurement("relative error of the sum", error, INACCURATE_ERROR, BASELINE, op.step),
        )
    if op.kind == "drift":  # of the total as it is, which may be a seventh of what it should be
        lost = f"{error:.0%} of its value" if error < 1 else f"{error:.1f} times what is left of it"
        return (
            f"The running sum at line {op.line} has lost {lost} to rounding in {op.dtype}: its"
            " terms are smaller than half the spacing of the total.",
            Measurement(
                "rounding errors over the total", error, INACCURATE_ERROR, BASELINE, op.step
            ),
        )
    return (
        f"The sum at line {op.line} did not change in {op.count} additions of something that is"
        " not zero.",
        Measurement("additions without effect", op.count, MIN_STAGNATED, BASELINE, op.step),
    )


RULE = Rule(
    code="AMP025",
    id="half_accumulation_stagnation",
    title="A running sum stagnated in half precision",
    definition="A long sum in half precision stops growing although terms keep coming.",
    check=check,
    needs=(BASELINE,),
    order=37,
    explains=("small_update_lost", "gradient_underflow"),
    is_measured=True,
)
