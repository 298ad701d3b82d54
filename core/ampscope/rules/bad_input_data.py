"""The data holds NaN or infinity.

What it detects
    A batch, or a tensor that no op made, with NaN or infinity before the first op sees it, at the
    step at which the fp32 control first fails. Latent: a few bad batches that the script leaves
    out or only evaluates, in fp32 as well, while both runs train. Infinity counts only where fp32
    fails: a mask may hold it.

Why it matters
    One bad sample kills an fp32 run for good; AMP skips that step and learns on, so it looks
    like an AMP problem when it is not.

Blind spots
    A value that a cast to half made infinite is finite in the fp32 control and is not blamed on
    the data; nor is a value that came in before, at the same place, without harm.

Remedy
    Repair or drop the bad samples; check the loader's arithmetic (division by a zero
    deviation).
"""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives, ForwardClass, RootOp, forward_class
from ampscope.analysis.run_view import ForeignValue, RunView, foreign_values
from ampscope.analysis.singular import is_impossible_alignment, shared_singularity
from ampscope.analysis.symptoms import Symptom
from ampscope.control import BASELINE
from ampscope.number_words import plural
from ampscope.observations import BadOp
from ampscope.rules.roots import same_in_fp32
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    inconclusive,
    op_verdict,
    passed,
    sample,
)


def check(evidence: Evidence) -> Verdict:
    """Found when the first non-finite value came in with a tensor, in both precisions; latent where
    the script leaves such batches out, or only evaluates them, and no symptom is left."""
    found = _found(evidence)
    # An evaluation that is not finite in fp32 either is no symptom of the baseline run.
    harm = evidence.symptoms | (evidence.fp32_symptoms - {Symptom.EVALUATION})
    if found.status is not Status.FOUND or harm:
        return found
    left_out = len(evidence.baseline.guarded_losses)
    harmless = (
        f"The script left out {plural(left_out, 'batch', 'batches')} for their loss, and trains."
        if left_out
        else "No training step uses it, and the script trains."
    )
    return replace(found, status=Status.LATENT, reason=f"{found.reason} {harmless}")


def _found(evidence: Evidence) -> Verdict:
    if evidence.fp32 is None:
        return inconclusive("Without the fp32 control a cast may have made it so.")
    root = evidence.root
    if (op := shared_singularity(evidence)) is not None and is_impossible_alignment(op):
        return op_verdict(
            RootOp(op, Arrives.LOSS),
            f"The CTC loss of line {op.line} is infinite at step {op.step}{sample(op)}: the"
            " input is too short for its target, so no alignment exists. AMP is innocent: the fp32"
            " control has the same.",
            Fix("fix_data", "Drop such samples, or give ctc_loss zero_infinity=True.", CTC_PATCH),
        )
    if root is not None and _prepares_data(root.op) and same_in_fp32(evidence, root.op):
        return op_verdict(
            root,
            f"Line {root.op.line} makes a value that is not finite before any model sees it"
            f" ({root.op.op}) at step {root.op.step}{sample(root.op)}. AMP is innocent: the fp32"
            " control makes it too.",
            Fix("fix_data", "Repair or drop the bad samples.", PATCH),
        )
    if evidence.fp32_fails:
        bad = evidence.fp32.first_bad_step
        own, reference = _first(evidence.baseline, bad), _first(evidence.fp32, bad)
    elif evidence.symptoms:
        return passed("fp32 trains on every batch: no input value did harm.")
    else:
        own, reference = _left_out(evidence.baseline), _left_out(evidence.fp32)
        if own is None or reference is None:
            return passed("fp32 trains on every batch that is not left out: no input did harm.")
    if own is None or reference is None:
        return passed("Nothing that is not finite came in where fp32 first fails.")
    return Verdict(
        Status.FOUND,
        f"{own.name} is not finite at step {own.step}{_where(own)}, before any op has seen it. AMP"
        " is innocent:"
        " the fp32 control meets the same values.",
        phase="forward",
        step=own.step,
        line=own.line,
        evidence=(
            Measurement("non-finite values came in", own.count, 0, BASELINE, own.step),
            Measurement("the same in the fp32 control", reference.count, 0, "fp32", reference.step),
        ),
        fix=Fix("fix_data", "Repair or drop the bad samples.", PATCH),
    )


PATCH = "if not torch.isfinite(batch).all():\n    continue  # and find out where it comes from\n"


CTC_PATCH = "loss = F.ctc_loss(log_probs, targets, lengths, target_lengths, zero_infinity=True)\n"


def _where(value: ForeignValue) -> str:
    return f" (first in sample {value.index[0]} of the batch)" if len(value.index) > 1 else ""


def _prepares_data(op: BadOp) -> bool:
    """Outside every module, on tensors that depend on no parameter. A mean over nothing is no
    value of the data: no sample has a label there."""
    is_outside = not op.tracked and not op.module_type and op.phase != "backward"
    return is_outside and forward_class(op) is not ForwardClass.EMPTY


def _first(run: RunView, bad: int | None) -> ForeignValue | None:
    """What came in new at step ``bad``; at any when fp32 has no bad step of its own."""
    return min((v for v in foreign_values(run) if bad is None or v.step == bad), default=None)


def _left_out(run: RunView) -> ForeignValue | None:
    """NaN that came in with a batch which the script then left out for its loss."""
    steps = {c.step for c in run.guarded_losses}
    return min(
        (v for v in foreign_values(run) if v.step in steps and not v.is_infinite), default=None
    )


RULE = Rule(
    code="AMP028",
    id="bad_input_data",
    title="The data holds NaN or infinity",
    definition="Inputs or targets are not finite before the first op sees them.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=22,
    explains=("not_amp_divergence", "loss_scale_too_high"),
    in_one_step=True,
    in_ops=False,
)
