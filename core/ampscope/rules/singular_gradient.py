"""The forward pass is finite and a derivative is not.

What it detects
    A backward op of a square root, norm, power, arctangent or division that turns finite inputs
    into infinity, at scale 1 as well.

Why it matters
    sqrt(x) has slope infinity at 0; a distance of a point from itself is the usual way there.

Blind spots
    Which of two coinciding singularities came first within one backward pass.

Remedy
    An epsilon inside the root, torch.linalg.vector_norm on inputs kept away from zero, or a
    clamp before.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.control import Control
from ampscope.rules.roots import SINGULAR, backward_root, is_discarded_branch, is_overflow
from ampscope.rules.verdict import Fix, Measurement, Rule, Verdict, op_verdict, passed


def check(evidence: Evidence) -> Verdict:
    """Found for a root in the backward pass that is no overflow and no discarded branch."""
    root = backward_root(evidence)
    if root is None or root.op.phase != "backward":
        return passed("No gradient was born non-finite.")
    op = root.op
    if is_discarded_branch(root):
        return passed("The incoming gradient was zero: a discarded branch.")
    if is_overflow(root) or not any(name in op.node for name in SINGULAR):
        return passed("The gradient overflowed, or its function has no singularity.")
    shared = evidence.fp32 is not None and bool(
        evidence.fp32.bad_gradient_attempts or evidence.fp32.bad_loss_attempts
    )
    innocent = (
        " AMP is innocent: fp32 has it too." if shared else " Only half precision reaches it."
    )
    return op_verdict(
        root,
        f"The derivative of line {op.line} ({op.node}) is infinite where its input is"
        f" zero.{innocent}",
        Fix(
            "raise_eps" if not shared else "rewrite_op",
            TEXT,
            PATCH,
            (Control.of(fp32_lines=op.line), "eps:0.0001") if not shared else (),
        ),
        (Measurement("fp32 fails too", str(shared), run="fp32"),),
    )


TEXT = "Keep the argument away from zero: an epsilon inside the root."
PATCH = "distance = torch.sqrt(squared + 1e-6)\n"


RULE = Rule(
    "singular_gradient",
    check,
    ("as_is", "fp32"),
    45,
    explains=(
        "loss_scale_too_high",
        "loss_magnitude_overflow",
    ),
)
