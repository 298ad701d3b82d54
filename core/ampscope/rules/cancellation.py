"""A difference of numbers that agree closely is nothing but their rounding.

What it detects
    A sum or difference in which numbers rounded to half cancel, so that a third of the elements or
    of the norm is not what fp32 makes of the same inputs: `elu(x) + 1`, `1 - sigmoid(x)`, squared
    distances as |a|² + |b|² - 2ab, a variance as E[x²] - E[x]². The ops that made the terms are
    computed again in fp32. Only where gradients come back through it and the training suffers, or
    its first gradients are not fp32's; latent where the training then learns as fp32's does.

Why it matters
    The subtraction itself is exact, so no op looks inaccurate and nothing overflows; features are
    exactly zero or noise, and the layers behind them learn nothing.

Blind spots
    Looked at are the first three steps and those that are powers of two. Terms that come from other
    steps, from ops in place or out of compiled code are not followed, nor are differences inside
    one kernel.

Remedy
    The stable form of the expression (where(x > 0, x + 1, exp(x)), sigmoid(-x), (a - b)²,
    var()), or the line in fp32 together with the lines that make its terms.
"""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.gradient_loss import WRONG, gradient_error
from ampscope.analysis.symptoms import Symptom, learns_slower, progress, symptoms
from ampscope.control import BASELINE, Control
from ampscope.observations import BadOp
from ampscope.rules.roots import lost_before
from ampscope.rules.verdict import (
    Fix,
    Measurement,
    Rule,
    Status,
    Verdict,
    inconclusive,
    passed,
    place,
)

LOST = 0.3  # of the norm of the result; or
SHARE = 1 / 3  # of its elements
TELLING = 20  # losses, before a training that learns as fp32 does clears first gradients


def check(evidence: Evidence) -> Verdict:
    """Found where a cancelled difference that the loss depends on comes with harm."""
    if evidence.fp32 is None:
        return inconclusive("Without the fp32 control the harm cannot be told.")
    root = evidence.root
    found = [b for b in evidence.baseline.bad_ops if b.kind == "cancelled"]
    if root is not None:
        first = lost_before(evidence.baseline, root.op)
        found = [b for b in found if b is first]
    found = [b for b in found if b.reached_gradient or root is not None]
    if not found:
        return passed("No difference of numbers rounded to half lost what fp32 keeps of it.")
    if evidence.fp32_fails:
        return inconclusive("fp32 fails as well.")
    harm = _harm(evidence)
    if harm is None:
        return passed("The training does not suffer from what differences lose.")
    op = max(found, key=lambda b: (b.step == 0, b.share or 0.0))
    controls = _controls(op)
    lifted = [evidence.runs[control] for control in controls if control in evidence.runs]
    if lifted and all(evidence.symptoms & symptoms(run, evidence.fp32) for run in lifted):
        return passed("With its lines or its module in fp32 the symptoms are as they are.")
    verdict = _found(op, harm, controls)
    is_latent = not evidence.symptoms and _keeps_up(evidence)
    return replace(verdict, status=Status.LATENT) if is_latent else verdict


def _keeps_up(evidence: Evidence) -> bool:
    """Whether fp32 learns in enough steps to tell, and the script no slower."""
    run, fp32 = evidence.baseline, evidence.fp32
    if fp32 is None or len(fp32.losses) < TELLING:
        return False
    return (progress(fp32) or 0.0) > 0 and not learns_slower(run, fp32)


def _harm(evidence: Evidence) -> Measurement | None:
    """What the training suffers; None where it does not."""
    harm = evidence.symptoms - {Symptom.DIVERGED}
    if harm:
        return Measurement("symptoms", ", ".join(sorted(harm)), run=BASELINE)
    assert evidence.fp32 is not None
    gradients = gradient_error(evidence.baseline, evidence.fp32)
    if gradients is None or gradients.error <= WRONG:
        return None
    return Measurement("error of the first gradients", gradients.error, WRONG, BASELINE, 0)


def _controls(op: BadOp) -> tuple[str, ...]:
    lines = ((op.line, *op.chain),) if op.chain else ((op.line,),)
    controls = [Control.of(fp32_lines=found) for found in lines if op.line]
    if op.module:
        controls.append(Control.of(fp32_modules=op.module))
    return tuple(controls)


STABLE_PATCH = """# of the difference, whichever of these it is
torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))  # elu(x) + 1
torch.sigmoid(-x)  # 1 - sigmoid(x)
torch.cdist(a.float(), b.float()) ** 2  # |a|^2 + |b|^2 - 2 a.b
x.float().var(dim, correction=0)  # mean of squares - square of the mean
"""


def _patch(op: BadOp) -> str:
    """The stable form of the pattern that the ops behind its terms show; all of them where they
    show none."""
    made_by = {name for term in op.inputs for name in term.producers[:4]}
    lines = STABLE_PATCH.splitlines(keepends=True)
    for at, names in ((1, {"elu"}), (2, {"sigmoid"}), (4, {"mean"}), (3, {"mm", "bmm"})):
        if made_by & names:
            return lines[at]
    return STABLE_PATCH


def _found(op: BadOp, harm: Measurement, controls: tuple[str, ...]) -> Verdict:
    share, error = op.share or 0.0, op.error or 0.0
    with_ = f" The terms are made at {', '.join(op.chain)}." if op.chain else ""
    return Verdict(
        Status.FOUND,
        f"{op.op} in {place(op)} cancels: its terms agree so closely that little but their rounding"
        f" to half is left. {share:.0%} of the elements are not what fp32 gives, up to"
        f" {op.fp32_max or 0.0:.3g} in magnitude; the result is off by {error:.0%} of fp32's"
        f" norm.{with_}",
        module=op.module or None,
        op=op.op,
        phase=op.phase,
        step=op.step,
        line=op.line,
        code=op.code,
        evidence=(
            Measurement("error over fp32's result", error, LOST, BASELINE, op.step),
            Measurement("share of elements lost", share, SHARE, BASELINE, op.step),
            harm,
        ),
        fix=Fix(
            "rewrite_op",
            "Write the stable form of it (sigmoid(-x) for 1 - sigmoid(x), exp(x) for elu(x) + 1"
            " below 0, (a - b)² for a² + b² - 2ab, var() for E[x²] - E[x]²), or compute the line"
            " and what makes its terms in fp32.",
            _patch(op),
            controls,
        ),
    )


RULE = Rule(
    code="AMP038",
    id="cancellation",
    title="A difference cancelled in half precision",
    definition="Numbers that were rounded to half are subtracted and agree so closely that little "
    "but their rounding is left.",
    check=check,
    needs=(BASELINE, "fp32"),
    order=36,
)
