"""A softmax row is minus infinity throughout.

What it detects
    A softmax over a row of minus infinity, in fp32 as well, with a loss or gradient that is not
    finite.

Why it matters
    The row is NaN in every precision, and its gradient poisons all weights even when the loss
    ignores the row.

Blind spots
    Fused attention does the softmax inside.

Remedy
    Do not mask a row completely: let each position attend at least to itself, or replace NaN
    before use.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.symptoms import Symptom
from ampscope.control import BASELINE
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, inconclusive, passed


def check(evidence: Evidence) -> Verdict:
    """Found when such a row was seen and both precisions go wrong."""
    use = evidence.baseline.use("fully_masked_row")
    if use is None:
        return passed("No softmax row was masked completely.")
    numbers = {Symptom.LOSS, Symptom.GRADIENTS, Symptom.WEIGHTS, Symptom.SKIPS, Symptom.EVALUATION}
    if not evidence.symptoms & numbers:
        return passed("A fully masked row was there and did no harm.")
    fp32 = evidence.fp32
    if fp32 is None:
        return inconclusive("Without the fp32 control the mask may be finite there.")
    reference = fp32.use("fully_masked_row")
    if reference is None or not evidence.fp32_fails:
        return passed("fp32 has no such row, or stays finite with it.")
    if fp32.first_bad_step not in (reference.step, None):
        return passed(
            f"fp32 stays finite with such a row from step {reference.step}, and fails elsewhere."
        )
    return Verdict(
        Status.FOUND,
        f"{use.value or 0:g} of {use.other or 0:g} softmax rows at line {use.line} are minus"
        " infinity throughout. AMP is innocent: fp32 gives NaN there too.",
        module=use.module or None,
        op=f"aten.{use.op}",
        phase="forward",
        step=use.step,
        line=use.line,
        evidence=(
            Measurement("rows masked completely", use.value or 0.0, 0, BASELINE, use.step),
            Measurement(
                "the same in the fp32 control", reference.value or 0.0, 0, "fp32", reference.step
            ),
        ),
        fix=Fix("rewrite_op", "Leave at least one position of each row unmasked.", PATCH),
    )


PATCH = """empty = mask.all(dim=-1, keepdim=True)
scores = scores.masked_fill(mask & ~empty, float("-inf"))
"""


RULE = Rule(
    code="AMP004",
    id="fully_masked_row",
    title="A softmax row is masked completely",
    definition="Softmax over a row that is minus infinity throughout gives NaN, in every "
    "precision.",
    check=check,
    needs=(BASELINE, "fp32"),
    order=25,
    explains=("not_amp_divergence", "singular_gradient", "masked_branch_gradient"),
)
