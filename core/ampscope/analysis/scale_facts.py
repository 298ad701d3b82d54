"""What the trajectory of the loss scale says: where a search ended, and what still fails there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives
from ampscope.analysis.run_view import RunView
from ampscope.observations import MIN_HAND_SCALE, Attempt, Call

HIGH_INIT = 2.0**32  # the highest start in common use, DeepSpeed's: an ordinary search
MANY_SKIPS = 16  # before the first step: more than a search from torch's 2^16 can take down to 1
MIN_LATE_SKIPS = 3
GROWS_TOO_FAST = 0.1  # share of skips after the search; torch's interval gives 0.0005


@dataclass(frozen=True, slots=True)
class ScaleFacts:
    """Of a run with a scaler. ``bearable`` is the largest scale at which a step was taken; None
    when no step was taken at all."""

    first: float
    last: float
    skipped: int
    leading: int  # skips before the first step that was taken
    late: int  # skips after that to which the scale had grown, or at which it stays the same
    total: int
    bearable: float | None

    @property
    def starts_too_high(self) -> bool:
        """The search began above any usual value and cost more steps than a usual one can. How
        many steps were watched after it has no say: it ended when the scale held."""
        return self.leading > MANY_SKIPS and self.first > HIGH_INIT

    @property
    def grows_too_fast(self) -> bool:
        """After the search the scale grows back into overflow again and again."""
        share = self.late / max(self.total - self.leading, 1)
        return self.late >= MIN_LATE_SKIPS and share > GROWS_TOO_FAST


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
        late=_late_skips(own[leading:]),
        total=len(own),
        bearable=max(taken) if taken else None,
    )


def _late_skips(own: Sequence[Attempt]) -> int:
    """Skips of descents that a growth began, a new scaler's higher scale among them.

    Where the scale has not grown, the steps before have borne it, and lower ones fail no less: it
    is not the scale. A scale that never changes overflows without any growth.
    """
    if len({a.scale for a in own}) == 1:
        return sum(a.skipped for a in own)
    count, last, has_grown = 0, dict[str, float](), False
    for before, attempt in pairwise(own):
        grew = attempt.scale > last.get(attempt.scaler, before.scale)
        is_over = before.skipped and not attempt.skipped  # the descent
        has_grown = grew or (has_grown and not is_over)
        count += attempt.skipped and has_grown
        last[attempt.scaler] = attempt.scale
    return count


def hand_scale_facts(run: RunView) -> ScaleFacts | None:
    """The trajectory of a factor that the script multiplies its loss by and changes itself; None of
    a constant one, and with a scaler.

    Each fall of the factor is a step that the script left out, because it found gradients that are
    not finite.
    """
    factors = [_hand_factor(c) for c in run.calls if c.name == "backward"]
    if run.has_scaler or None in factors:
        return None
    own = [f for f in factors if f is not None]
    if len(set(own)) < 2 or max(own) < MIN_HAND_SCALE:
        return None
    falls = [n for n, (before, after) in enumerate(pairwise(own)) if after < before]
    leading = next((n for n, (a, b) in enumerate(pairwise(own)) if b >= a), len(own) - 1)
    taken = [f for n, f in enumerate(own) if n not in falls]
    return ScaleFacts(
        first=own[0],
        last=own[-1],
        skipped=len(falls),
        leading=leading,
        late=sum(n >= leading for n in falls),
        total=len(own),
        bearable=max(taken) if taken else None,
    )


def _hand_factor(call: Call) -> float | None:
    """What the root of a backward was multiplied by; None where it was by no constant."""
    name, _, text = call.note.partition(" ")
    return float(text) if text and name in ("mul", "mul_") else None


def fails_forward(evidence: Evidence) -> bool:
    """A non-finite loss: no scale can cure it."""
    run = evidence.as_is
    root = evidence.root
    if root is not None and root.op.phase == "backward":
        return False
    share = len(run.bad_loss_attempts) / len(run.attempts) if run.attempts else 0.0
    return share > 0.2 or (root is not None and root.arrives is Arrives.LOSS and share > 0)


def static_scale(run: RunView) -> float | None:
    """A constant by which the script multiplies its loss by hand, :data:`MIN_HAND_SCALE` or
    more."""
    for call in run.calls:
        if call.name == "backward" and call.note.startswith(("mul ", "mul_ ")):
            factor = float(call.note.split()[1])
            if factor >= MIN_HAND_SCALE:
                return factor
    return None


UNCHANGED = 1e-3  # relative: the norm of gradients at the step is that at the end of backward
IS_RATE = 0.05  # relative: a step's length is its gradient times the learning rate


def undivided_by_hand(run: RunView) -> float | None:
    """A constant by which the script multiplies its loss and never divides the gradients, so that
    its steps are longer by it. None where a division is possible: where the gradients at the step
    differ from those that backward left, where hooks change them, or where the steps do not grow
    with the gradients, as Adam's."""
    factor = static_scale(run)
    if factor is None or run.has_scaler:
        return None
    finite = [a for a in run.attempts if a.grad_norm and not a.grad_nonfinite]
    seen = [a for a in finite if a.backward_norm and math.isfinite(a.backward_norm)]
    if not seen or len(seen) < len(finite) - 1:  # an optimizer is met first at its first call
        return None
    if not all(_is_near(a.grad_norm, a.backward_norm, UNCHANGED) for a in seen):
        return None
    first = seen[0]
    is_rate = first.lr > 0 and _is_near(
        first.update_norm, first.lr * (first.grad_norm or 0.0), IS_RATE
    )
    return factor if is_rate else None


def _is_near(value: float | None, expected: float | None, tolerance: float) -> bool:
    if value is None or expected is None or not math.isfinite(value + expected):
        return False
    return abs(value - expected) <= tolerance * abs(expected)


def scaled_by_hand(evidence: Evidence) -> float | None:
    """The constant whose product with the loss is itself the first non-finite value."""
    factor, root = static_scale(evidence.as_is), evidence.root
    if factor is None or root is None or root.arrives is not Arrives.LOSS:
        return None
    is_product = root.name in ("mul", "mul_") and factor in root.op.scalars
    return factor if is_product and root.op.total == 1 else None


def bears_one(evidence: Evidence) -> bool:
    """With the scale held at 1 the scaler takes steps; False when that control was not run."""
    low = evidence.runs.get("scale:1")
    return low is not None and len(low.skips) < len(low.attempts) and low.has_scaler
