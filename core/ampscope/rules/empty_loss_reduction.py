"""The loss averaged an empty set.

What it detects
    A mean, a cross entropy or a quotient by a count, NaN because there was nothing to average,
    in fp32 as well.

Why it matters
    The loss of that step is NaN although nothing overflowed; often its gradients are zero and
    training goes on.

Blind spots
    A custom reduction that hides its count in several ops.

Remedy
    Skip the batch, or divide by max(count, 1).
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives, ForwardClass, RootOp, forward_class
from ampscope.analysis.symptoms import Symptom
from ampscope.control import BASELINE
from ampscope.rules.roots import same_in_fp32
from ampscope.rules.verdict import Fix, Rule, Verdict, op_verdict, passed


def check(evidence: Evidence) -> Verdict:
    """Found when the root op of the loss averages nothing, in both precisions."""
    if Symptom.LOSS not in evidence.symptoms | evidence.fp32_symptoms:
        return passed("Every loss is finite.")
    for op in sorted(evidence.baseline.bad_ops, key=lambda b: (b.step, b.id)):
        is_empty = op.phase != "backward" and forward_class(op) is ForwardClass.EMPTY
        if op.kind == "nonfinite" and is_empty and op.reached_loss:
            if not same_in_fp32(evidence, op):
                continue
            return op_verdict(
                RootOp(op, Arrives.LOSS),
                f"Line {op.line} averages nothing at step {op.step}: the count is zero. AMP is "
                "innocent: fp32 gives NaN too.",
                Fix("guard_reduction", "Divide by max(count, 1), or skip such a batch.", PATCH),
            )
    return passed("No reduction was empty.")


PATCH = "loss = total / count.clamp(min=1)\n"


RULE = Rule(
    code="AMP031",
    id="empty_loss_reduction",
    title="A mean over nothing",
    definition="The loss averaged an empty set, in every precision.",
    check=check,
    needs=(BASELINE, "fp32"),
    order=24,
    explains=("not_amp_divergence",),
)
