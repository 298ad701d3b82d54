"""What the trajectory of the loss scale says: where a search ended, and what still fails there."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives
from ampscope.analysis.run_view import RunView


@dataclass(frozen=True, slots=True)
class ScaleFacts:
    """Of a run with a scaler. ``bearable`` is the largest scale at which a step was taken after the
    first skip; None when no step was taken at all."""

    first: float
    last: float
    skipped: int
    leading: int
    late: int
    total: int
    bearable: float | None


def scale_facts(run: RunView) -> ScaleFacts | None:
    """None for a run without a scaler."""
    own = [a for a in run.attempts if a.scaler]
    if not own:
        return None
    taken = [a.scale for a in own if not a.skipped and not a.grad_nonfinite]
    leading = run.leading_skips
    return ScaleFacts(
        first=own[0].scale,
        last=own[-1].scale,
        skipped=sum(a.skipped for a in own),
        leading=leading,
        late=sum(a.skipped for a in own[leading:]),
        total=len(own),
        bearable=max(taken) if taken else None,
    )


def fails_forward(evidence: Evidence) -> bool:
    """A non-finite loss: no scale can cure it."""
    run = evidence.as_is
    root = evidence.root
    if root is not None and root.op.phase == "backward":
        return False
    share = len(run.bad_loss_attempts) / len(run.attempts) if run.attempts else 0.0
    return share > 0.2 or (root is not None and root.arrives is Arrives.LOSS and share > 0)


def static_scale(run: RunView) -> float | None:
    """A constant by which the script multiplies its loss by hand, 128 or more."""
    for call in run.calls:
        if call.name == "backward" and call.note.startswith(("mul ", "mul_ ")):
            factor = float(call.note.split()[1])
            if factor >= 128:
                return factor
    return None


def scaled_by_hand(evidence: Evidence) -> float | None:
    """The constant whose product with the loss is itself the first non-finite value."""
    factor, root = static_scale(evidence.as_is), evidence.root
    if factor is None or root is None or root.arrives is not Arrives.LOSS:
        return None
    is_product = root.name in ("mul", "mul_") and factor in root.op.scalars
    return factor if is_product and root.op.total == 1 else None
