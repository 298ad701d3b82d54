"""What the trajectory of the loss scale says, a scaler's or that of a factor set by hand: where a
search ended, what still fails there, and whether the factor is a loss scale at all.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives
from ampscope.analysis.run_view import RunView
from ampscope.control import SCALE_1
from ampscope.numerics.formats import FP16
from ampscope.observations import MIN_HAND_SCALE, Call, OptimizerStep

HIGH_INIT = 2.0**32  # the highest start in common use, DeepSpeed's: an ordinary search
MANY_SKIPS = 16  # before the first step: more than a search from torch's 2^16 can take down to 1
LONG_SEARCH, LONG_SHARE = 5, 0.05  # skips, and their share of all steps: worth a sentence
MIN_LATE_SKIPS = 3
GROWS_TOO_FAST = 0.1  # share of skips after the search; torch's interval gives 0.0005
UNCHANGED = 1e-3  # relative: the norm of gradients at the step is that at the end of backward
IS_RATE = 0.05  # relative: a step's length is its gradient times the learning rate


@dataclass(frozen=True, slots=True)
class ScaleFacts:
    """Of a run with a scaler. ``largest_taken`` is the largest scale at which a step was taken;
    None when no step was taken at all."""

    first: float
    last: float
    skipped: int
    leading: int  # skips before the first step that was taken
    late: int  # skips after that to which the scale had grown, or at which it stays the same
    total: int
    largest_taken: float | None
    still_falls: bool = False  # every step was skipped, and the last skip lowered the scale
    refused: int = 0  # batches that the script left out although its factor did not fall

    @property
    def starts_too_high(self) -> bool:
        """The search began above any usual value and cost more steps than a usual one can. How
        many steps were watched after it has no say: it ended when the scale held."""
        return self.leading > MANY_SKIPS and self.first > HIGH_INIT

    @property
    def loses_many(self) -> bool:
        """The search at the start ended, and cost a notable part of the steps."""
        is_search = self.largest_taken is not None and self.largest_taken < self.first
        return is_search and self.leading >= max(LONG_SEARCH, LONG_SHARE * self.total)

    @property
    def grows_too_fast(self) -> bool:
        """After the search the scale grows back into overflow again and again."""
        share = self.late / max(self.total - self.leading, 1)
        return self.late >= MIN_LATE_SKIPS and share > GROWS_TOO_FAST

    @property
    def cannot_fall(self) -> bool:
        """Batches are lost again and again to a factor of the script's own that stays as it is."""
        often = self.refused > GROWS_TOO_FAST * self.total
        return self.refused >= MIN_LATE_SKIPS and often and self.last > 1


def scale_facts(run: RunView) -> ScaleFacts | None:
    """None for a run without a scaler."""
    own = [a for a in run.steps if a.scaler]
    if not own:
        return None
    taken = [a.scale for a in own if not a.skipped and not a.grad_nonfinite]
    leading = run.leading_skips
    last = own[-2:]  # a single step does not tell
    falls = len(last) < 2 or last[1].scale < last[0].scale
    return ScaleFacts(
        first=own[0].scale,
        last=own[-1].scale,
        skipped=sum(a.skipped for a in own),
        leading=leading,
        late=_late_skips(own[leading:]),
        total=len(own),
        largest_taken=max(taken) if taken else None,
        still_falls=falls and own[-1].scale > 1 and all(a.skipped for a in own),
    )


def _late_skips(own: Sequence[OptimizerStep]) -> int:
    """Skips of descents that a growth began, a new scaler's higher scale among them.

    Where the scale has not grown, steps before were taken at it, and lower ones fail no less: it
    is not the scale. A scale that never changes overflows without any growth.
    """
    if len({a.scale for a in own}) == 1:
        return sum(a.skipped for a in own)
    count, last, has_grown = 0, dict[str, float](), False
    for before, step in pairwise(own):
        grew = step.scale > last.get(step.scaler, before.scale)
        is_over = before.skipped and not step.skipped  # the descent
        has_grown = grew or (has_grown and not is_over)
        count += step.skipped and has_grown
        last[step.scaler] = step.scale
    return count


_WRITES_SCALE = re.compile(r"\._scale\b(\.data\b)?\s*(=(?!=)|[*+/-]=|\.[a-z]+_\()")


@dataclass(frozen=True, slots=True)
class ScaleRaised:
    """The script itself put a scale up, ``count`` times: to ``scale`` at ``line``, by ``how``: a
    call of ``load_state_dict``, or a value that it wrote into the scaler."""

    line: str
    how: str
    scale: float
    count: int


def scale_raised(run: RunView) -> ScaleRaised | None:
    """Scales that are higher at a loss than the ``update`` before left them; at the line that did
    it most often, twice at least. A resume is one load."""
    last: dict[str, float] = {}
    loaded: dict[str, str] = {}
    found: list[tuple[str, str, float]] = []
    for call in run.calls:
        if call.name == "scaler_load_state_dict":
            loaded[call.subject] = call.line
        elif call.name in ("scale", "update") and call.value is not None:
            before = last.get(call.subject, call.value)
            if call.name == "scale" and call.value > before:
                how = "load_state_dict" if call.subject in loaded else "a value of its own"
                line = loaded.get(call.subject) or _writes_scale_at(run)
                found.append((line, how, call.value))
            last[call.subject] = call.value
            loaded.pop(call.subject, None)
    if len(found) < 2:
        return None
    (line, how), count = Counter((line, how) for line, how, _ in found).most_common(1)[0]
    return ScaleRaised(line, how, max(v for at, _, v in found if at == line), count)


def _writes_scale_at(run: RunView) -> str:
    """The first line of the script that writes into a scaler, which no call tells; "" where there
    is none, or sources are left out."""
    for source in run.sources:
        for number, text in enumerate(source.lines, 1):
            if _WRITES_SCALE.search(text.partition("#")[0]):
                return f"{source.file}:{number}"
    return ""


def scale_set_at(run: RunView) -> str:
    """The line that decides about a scale that is too high: the script's own that puts it up; the
    ``update`` after which it is no lower although the step was skipped; or else the line that makes
    the scaler."""
    raised = scale_raised(run)
    if raised is not None and raised.line:
        return raised.line
    skipped = {(a.scaler, a.step): a.scale for a in run.steps if a.skipped and a.scaler}
    if not skipped:
        return ""
    kept = Counter(
        c.line
        for c in run.calls
        if c.name == "update"
        and c.value is not None
        and c.value >= skipped.get((c.subject, c.step - 1), math.inf)
    )
    if kept:
        return kept.most_common(1)[0][0]
    return scaler_made_at(run, next(iter(skipped))[0])


def scaler_made_at(run: RunView, scaler: str = "") -> str:
    """The line that makes the scaler, or the first one; "" where none was recorded."""
    made = (c for c in run.calls if c.name == "scaler_new" and scaler in ("", c.subject))
    return next((c.line for c in made), "")


def steps_at_scale_1(evidence: Evidence) -> bool:
    """With the scale held at 1 the scaler takes steps; False when that control was not run."""
    low = evidence.runs.get(SCALE_1)
    return low is not None and len(low.skips) < len(low.steps) and low.has_scaler


def fails_forward(evidence: Evidence) -> bool:
    """A non-finite loss: no scale can cure it."""
    run = evidence.baseline
    root = evidence.root
    if root is not None and root.op.phase == "backward":
        return False
    share = len(run.bad_loss_steps) / len(run.steps) if run.steps else 0.0
    return share > 0.2 or (root is not None and root.arrives is Arrives.LOSS and share > 0)


def hand_scale_facts(run: RunView) -> ScaleFacts | None:
    """The trajectory of a factor that the script multiplies its loss by and changes itself; None of
    a constant one, and with a scaler.

    Each fall of the factor is a step that the script left out, because it found gradients that are
    not finite.
    """
    factors = [hand_factor(c) for c in run.calls if c.name == "backward"]
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
        largest_taken=max(taken) if taken else None,
        refused=max(len(run.guarded_gradients) - len(falls), 0),
    )


def hand_scaled_at(run: RunView) -> str:
    """The line whose backward is of a loss that the script scales by hand; "" without one."""
    found = (c for c in run.calls if c.name == "backward" and (hand_factor(c) or 0) > 1)
    return next((c.line for c in found if c.line), "")


def hand_factor_at(run: RunView, step: int) -> float | None:
    """What the loss of a step was multiplied by; None where it was by no constant."""
    found = (c for c in run.calls if c.name == "backward" and c.step == step)
    return next((factor for c in found if (factor := hand_factor(c)) is not None), None)


def hand_factor(call: Call) -> float | None:
    """What the root of a backward was multiplied by; None where it was by no constant."""
    name, _, text = call.note.partition(" ")
    return float(text) if text and name in ("mul", "mul_") else None


def fits_unscaled(evidence: Evidence, factor: float) -> bool:
    """Whether the gradient that overflows first is within half precision once the ``factor`` at
    which it was seen is taken off it."""
    root = evidence.root
    if root is None or root.op.phase != "backward" or not root.op.fp32_finite:
        return False
    return root.op.fp32_max is not None and root.op.fp32_max / factor < FP16.max


def static_scale(run: RunView) -> float | None:
    """A constant by which the script multiplies its loss by hand, :data:`MIN_HAND_SCALE` or
    more."""
    for call in run.calls:
        if call.name == "backward" and call.note.startswith(("mul ", "mul_ ")):
            factor = float(call.note.split()[1])
            if factor >= MIN_HAND_SCALE:
                return factor
    return None


def scaled_by_hand(evidence: Evidence) -> float | None:
    """The constant whose product with the loss is itself the first non-finite value."""
    factor, root = static_scale(evidence.baseline), evidence.root
    if factor is None or root is None or root.arrives is not Arrives.LOSS:
        return None
    is_product = root.name in ("mul", "mul_") and factor in root.op.scalars
    return factor if is_product and root.op.total == 1 else None


def undivided_by_hand(run: RunView) -> float | None:
    """A constant by which the script multiplies its loss and never divides the gradients, so that
    its steps are longer by it. None where a division is possible: where the gradients at the step
    differ from those that backward left, where hooks change them, or where the steps do not grow
    with the gradients, as Adam's."""
    factor = static_scale(run)
    if factor is None or run.has_scaler:
        return None
    seen = _undivided_steps(run)
    return factor if seen and _goes_by_the_gradient(seen[0], 1.0) else None


def part_of_the_loss(evidence: Evidence) -> float | None:
    """A constant by which the script multiplies its loss and by which nothing divides the
    gradients, neither before the step nor in it: it is no loss scale, and the loss itself is
    large. Read off the fp32 control, whose gradients are finite; None without one."""
    run, fp32 = evidence.baseline, evidence.fp32
    factor = static_scale(run)
    if factor is None or run.has_scaler or fp32 is None or static_scale(fp32) != factor:
        return None
    seen = _undivided_steps(fp32)
    return None if not seen or _goes_by_the_gradient(seen[0], factor) else factor


def _undivided_steps(run: RunView) -> list[OptimizerStep]:
    """The steps, if all of them took the gradients that backward left, but for a clip by norm; else
    none."""
    finite = [a for a in run.steps if a.grad_norm and not a.grad_nonfinite]
    seen = [a for a in finite if a.backward_norm and math.isfinite(a.backward_norm)]
    if len(seen) < len(finite) - 1:  # an optimizer is met first at its first call
        return []
    taken = ((a.unclipped_norm or a.grad_norm, a.backward_norm) for a in seen)
    return seen if all(_is_near(norm, left, UNCHANGED) for norm, left in taken) else []


def _goes_by_the_gradient(step: OptimizerStep, factor: float) -> bool:
    """Whether its length is the learning rate times the gradient over ``factor``."""
    expected = step.lr * (step.grad_norm or 0.0) / factor
    return step.lr > 0 and _is_near(step.update_norm, expected, IS_RATE)


def _is_near(value: float | None, expected: float | None, tolerance: float) -> bool:
    if value is None or expected is None or not math.isfinite(value + expected):
        return False
    return abs(value - expected) <= tolerance * abs(expected)
