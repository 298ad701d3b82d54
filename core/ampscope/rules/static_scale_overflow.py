"""The verdict on a loss that the script multiplies by a constant of its own, without a scaler."""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.skips import scaled_by_hand, static_scale
from ampscope.rules.roots import is_overflow
from ampscope.rules.verdict import Fix, Measurement, Verdict, not_applicable, op_verdict, place


def static_scale_overflow(evidence: Evidence) -> Verdict:
    """Found when the product itself, or the gradient that it leads to, overflows."""
    factor, root = static_scale(evidence.baseline), evidence.root
    by_hand = scaled_by_hand(evidence) is not None
    overflows = by_hand or (root is not None and is_overflow(root))
    if factor is None or root is None or not overflows or not evidence.symptoms:
        return not_applicable("No loss was scaled.")
    what = "the product" if by_hand else f"the gradient of {place(root.op)}"
    return op_verdict(
        root,
        f"The loss is multiplied by {factor:,.6g} by hand, and {what} overflows.",
        Fix(
            "change_scale",
            "Use torch.amp.GradScaler: its scale adapts.",
            "scaler = torch.amp.GradScaler(device)\n",
        ),
        (Measurement("static loss scale", factor, None, "as_is"),),
    )
