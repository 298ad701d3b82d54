"""The forward pass is finite and a derivative is not.

What it detects
    A backward op that turns finite inputs into infinity or NaN where fp32 does so as well, whatever
    it differentiates: a logarithm or p log p at 0, a solve of a singular matrix, vectors of equal
    singular values. One of a square root, norm, power, arctangent or division that does so at scale
    1 as well; or whose result passes the largest half-precision number there although loss and
    incoming gradient are of ordinary size.

Why it matters
    sqrt(x) has slope infinity at 0; a distance of a point from itself is the usual way there.

Blind spots
    Which of two coinciding singularities came first within one backward pass.

Remedy
    An epsilon inside the root, torch.linalg.vector_norm on inputs kept away from zero, a clamp
    before, or the same quantity computed from logarithms.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.scale_facts import static_scale
from ampscope.analysis.singular import is_singular_derivative
from ampscope.control import BASELINE, SCALE_1, Control
from ampscope.observations import BadOp
from ampscope.rules.backward_roots import (
    SINGULAR,
    backward_root,
    is_discarded_branch,
    is_overflow,
    remedy,
)
from ampscope.rules.verdict import Fix, Measurement, Rule, Verdict, op_verdict, passed


def check(evidence: Evidence) -> Verdict:
    """Found for a root in the backward pass that is no overflow and no discarded branch."""
    root = backward_root(evidence)
    if root is None or root.op.phase != "backward":
        return passed("No gradient was born non-finite.")
    op = root.op
    if is_discarded_branch(evidence, root):
        return passed("The incoming gradient was zero: a discarded branch.")
    steep = is_overflow(root) and _too_steep(evidence, op)
    is_singular = is_singular_derivative(op) or any(name in op.node for name in SINGULAR)
    if (is_overflow(root) and not steep) or not is_singular:
        return passed("The gradient overflowed, or its function has no singularity.")
    shared = evidence.fp32 is not None and bool(
        evidence.fp32.bad_gradient_steps or evidence.fp32.bad_loss_steps
    )
    innocent = (
        " AMP is innocent: fp32 has it too." if shared else " Only half precision reaches it."
    )
    return op_verdict(
        root,
        f"The derivative of line {op.line} ({op.node}) exceeds the largest {op.dtype} number near"
        " its singularity, at a loss scale of 1 too."
        if steep
        else f"The loss is finite, and the derivative of line {op.line} ({op.node}) is"
        f" {_what(op)}.{innocent}",
        Fix(
            "raise_eps" if not shared else "rewrite_op",
            *remedy(op),
            (Control.of(fp32_lines=op.line), "eps:0.0001") if not shared else (),
        ),
        (Measurement("fp32 fails too", str(shared), run="fp32"),),
    )


def _what(op: BadOp) -> str:
    """What the derivative is, and out of what."""
    kinds = [word for word, n in (("NaN", op.nan), ("infinite", op.pos_inf + op.neg_inf)) if n]
    zeros = sum(o.zeros for o in op.inputs)
    some = f", {zeros:,} of them zero" if zeros else ""
    return f"{' or '.join(kinds) or 'infinite'}: {op.op} takes finite numbers there{some}"


def _too_steep(evidence: Evidence, op: BadOp) -> bool:
    """Whether the op overflows without a loss scale too, and what went in is of ordinary size: it
    is the derivative that is too large, not the gradient that it is multiplied by."""
    fp32, run = evidence.fp32, evidence.baseline
    bare = evidence.runs.get(SCALE_1) if run.has_scaler else run
    if fp32 is None or bare is None or evidence.fp32_fails or static_scale(run) is not None:
        return False
    again = [
        b
        for b in bare.bad_ops
        if (b.line, b.phase, b.node) == (op.line, op.phase, op.node) and b.kind == "nonfinite"
    ]
    sizes = [o.max_abs for b in again[:1] for o in b.inputs if o.max_abs is not None]
    return bool(sizes) and max(sizes) < ORDINARY and abs(fp32.head_loss or 0.0) < ORDINARY


ORDINARY = 1e3  # inputs of that size give a result beyond fp16's 65,504 only by a steep derivative


RULE = Rule(
    code="AMP009",
    id="singular_gradient",
    title="A derivative is infinite",
    definition="The forward pass is finite and a derivative is not (square root, norm or logarithm "
    "at zero, solve of a singular matrix).",
    check=check,
    needs=(BASELINE, "fp32"),
    order=45,
    explains=("loss_scale_too_high", "loss_magnitude_overflow"),
)
