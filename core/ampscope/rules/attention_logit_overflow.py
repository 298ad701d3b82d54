"""The logits of an attention, or of another softmax over similarities, overflowed.

What it detects
    A matmul of two activations that feeds a softmax and is infinite in half, finite in fp32.

Why it matters
    The softmax of a row with infinity is NaN.

Blind spots
    Fused attention kernels compute the matmul inside and show no op of their own.

Remedy
    Scale one factor before the matmul, as in (q * scale) @ k, normalise both, or compute the
    logits in fp32.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import PRODUCTS, SOFTMAXES, ForwardClass, RootOp
from ampscope.control import BASELINE
from ampscope.observations import BadOp
from ampscope.rules.roots import forward_root
from ampscope.rules.verdict import Rule, Verdict, island, op_verdict, place


def check(evidence: Evidence) -> Verdict:
    """Found when the root op of what went wrong is of this class and fp32 does not share it."""
    found = forward_root(evidence, ForwardClass.ATTENTION)
    if not isinstance(found, RootOp):
        return found
    op = found.op
    largest = f"{op.fp32_max or float('inf'):,.6g}"
    if _mixes_values(op):
        reason = (
            f"The attention logits of {place(op)} overflowed: the matmul of queries and keys"
            f" reaches {largest} before it is scaled."
        )
        text = "Scale q before the matmul, or compute the logits in fp32."
    else:
        reason = (
            f"The logits of a softmax overflowed in {place(op)}: the product of two activations"
            f" reaches {largest} before it is scaled."
        )
        text = "Scale or normalise a factor before the matmul, or compute the logits in fp32."
    return op_verdict(found, reason, island(op, "fp32_module", text))


def _mixes_values(op: BadOp) -> bool:
    """Whether what follows the softmax weights values, as attention does; a contrastive loss has no
    further matmul."""
    names = op.consumers
    softmax = next((n for n, name in enumerate(names) if name in {*SOFTMAXES, "exp"}), len(names))
    return any(name in PRODUCTS for name in names[softmax:])


RULE = Rule(
    code="AMP002",
    id="attention_logit_overflow",
    title="Attention or similarity logits overflowed",
    definition="The matmul of queries and keys, or of two embeddings, exceeds the format's largest "
    "number before it is scaled.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=50,
    explains=("loss_scale_too_high", "gradient_underflow"),
    searches_modules=True,
)
