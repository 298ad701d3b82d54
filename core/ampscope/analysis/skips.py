"""Skipped steps: why each was skipped, which parameters held Inf or NaN in the order backward
reached them, and what the trajectory of the loss scale says, of a scaler's and of a factor set by
hand.

The first parameter in backward order is nearest to where the trouble began; the rest mostly inherit
it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives
from ampscope.analysis.run_view import RunView
from ampscope.control import SCALE_1
from ampscope.numerics.formats import FP16
from ampscope.observations import MIN_HAND_SCALE, Call, OptimizerStep
from ampscope.records import StepRecord

# Why each skipped step was skipped: the search for a scale, a spike of the gradients, a fault.
#
#     calibration     no step of the same optimizer was taken yet, its next one is at a smaller
#                     scale, and none near it at this scale or a larger one: how GradScaler finds
#                     its scale
#     growth probing  the same right after the scale had grown, while it comes down to where it was:
#                     the larger scale was tried and refused
#     spike           steps near it were taken at this scale, and this step's own gradients were
#                     too large for it in fp32 as well (a shadow was run at the skip); or, without
#                     a shadow: the loss had doubled, the first bad gradient holds Inf and no NaN,
#                     and the next step was taken at half the scale
#     NaN alone       no weight's gradient holds Inf, some hold NaN: a formula gave 0/0 or the like,
#                     and no scale helps; or Inf met Inf or zero before it came to a weight, which
#                     the gradients of outputs show
#     fault           the loss itself was not finite, fp32's gradients are not finite either, or
#                     they still were not at a scale of 1, where nothing is multiplied any more
#     unclear         none of these: where a step near it was taken at this scale, a batch with
#                     large gradients and one with a NaN look alike


WITHOUT_SHADOW = "not explained without an fp32 shadow"
UNSCALED = 1.0
JUMP = 2.0  # times the loss of the step before: a bad update, not the batches' own spread
NEAR = 20  # steps before and after; over more, gradients themselves may halve


class SkipCause(StrEnum):
    """Why a step was left out."""

    CALIBRATION = "calibration"
    GROWTH = "growth probing"
    SPIKE = "spike"
    NAN_ALONE = "NaN alone"
    FAULT = "fault"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class SkipEvidence:
    """What was recorded of a step's bad gradients: elements with NaN and with Inf in the first of
    them in backward order and in all; ``fp32_largest`` is the largest magnitude of the same
    gradients in fp32, unscaled, where a shadow was run at the skip."""

    first_nan: int = 0
    first_inf: int = 0
    nan: int = 0
    inf: int = 0
    fp32_largest: float | None = None


def skip_causes(
    steps: Sequence[StepRecord],
    optimizers: Mapping[int, str] | None = None,
    evidence: Mapping[int, SkipEvidence] | None = None,
) -> dict[int, SkipCause]:
    """Of every skipped step in order. ``optimizers`` names the optimizer of each step where a run
    has several: a scaler that they share skips the step of one and takes the other's. ``evidence``
    is what is known of the gradients of skipped steps."""
    seen = evidence or {}
    own: dict[str, list[StepRecord]] = {}
    for step in steps:
        own.setdefault((optimizers or {}).get(step.step, ""), []).append(step)
    found = {number: cause for series in own.values() for number, cause in _causes(series, seen)}
    return dict(sorted(found.items()))


def _causes(
    series: Sequence[StepRecord], evidence: Mapping[int, SkipEvidence]
) -> Iterator[tuple[int, SkipCause]]:
    """Of the skipped steps of one optimizer, last first."""
    next_scale: float | None = None  # of the next step that was taken
    searches = _searches(series)
    for place in reversed(range(len(series))):
        step = series[place]
        if step.skipped:
            before = series[max(place - NEAR, 0) : place]
            after = series[place + 1 : place + NEAR + 1]
            known = evidence.get(step.step, SkipEvidence())
            search = searches.get(step.step)
            yield step.step, _cause(step, search, next_scale, before, after, known)
        else:
            next_scale = step.scale


def _searches(series: Sequence[StepRecord]) -> dict[int, SkipCause]:
    """Of each skip with which a search can come down: from the first scale of all, or from one to
    which the scale has just grown to the one before. A descent that an overflow began at a scale at
    which steps were taken is no search, however long it is."""
    found: dict[int, SkipCause] = {}
    taken: StepRecord | None = None  # the last one
    for step in series:
        if not step.skipped:
            taken = step
        elif taken is None:
            found[step.step] = SkipCause.CALIBRATION
        elif (taken.scale or 0.0) < (step.scale or 0.0):
            found[step.step] = SkipCause.GROWTH
    return found


def _cause(
    step: StepRecord,
    search: SkipCause | None,
    next_scale: float | None,
    before: Sequence[StepRecord],
    after: Sequence[StepRecord],
    known: SkipEvidence,
) -> SkipCause:
    if step.loss is not None and not math.isfinite(step.loss):
        return SkipCause.FAULT
    if step.scale is None:
        return SkipCause.UNCLEAR
    largest = known.fp32_largest
    if largest is not None and not math.isfinite(largest):
        return SkipCause.FAULT
    nan_alone = known.nan > 0 and known.inf == 0
    if step.scale <= UNSCALED:
        return SkipCause.NAN_ALONE if nan_alone else SkipCause.FAULT
    taken = [s.scale for s in (*before, *after) if not s.skipped and s.scale is not None]
    if search is not None and next_scale is not None and max((*taken, next_scale)) < step.scale:
        return search
    if largest is not None and largest * step.scale > FP16.max:
        return SkipCause.SPIKE
    if nan_alone:
        return SkipCause.NAN_ALONE
    halved = bool(after) and not after[0].skipped and (after[0].scale or 0.0) <= step.scale / 2
    if halved and known.first_inf and not known.first_nan and _has_doubled(step, before):
        return SkipCause.SPIKE
    return SkipCause.UNCLEAR


def _has_doubled(step: StepRecord, before: Sequence[StepRecord]) -> bool:
    """The loss of this step is at least twice that of the step before it."""
    last = before[-1].loss if before else None
    if last is None or step.loss is None or not math.isfinite(last):
        return False
    return last > 0 and step.loss >= JUMP * last


def counted(causes: dict[int, SkipCause]) -> str:
    """ "3 calibrations, 1 fault"; "" without a skip."""
    names = {
        SkipCause.CALIBRATION: ("calibration", "calibrations"),
        SkipCause.GROWTH: ("probe of a grown scale", "probes of a grown scale"),
        SkipCause.SPIKE: ("spike", "spikes"),
        SkipCause.NAN_ALONE: ("NaN alone", "NaN alone"),
        SkipCause.FAULT: ("fault", "faults"),
        SkipCause.UNCLEAR: (WITHOUT_SHADOW, WITHOUT_SHADOW),
    }
    parts = []
    for cause, (one, many) in names.items():
        count = sum(c is cause for c in causes.values())
        if count:
            parts.append(f"{count:,} {one if count == 1 else many}")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class BadStep:
    """One step that was skipped, or whose gradients were not finite although it was taken."""

    step: int
    scale: float | None
    skipped: bool
    parameter_count: int  # parameters whose gradients held NaN or Inf
    first_parameter: str  # the first that backward reached, "" when none was recorded
    cause: SkipCause | None = None  # of a skipped step


def bad_steps(
    steps: Sequence[StepRecord],
    firsts: Mapping[int, tuple[int, str]],
    optimizers: Mapping[int, str] | None = None,
    evidence: Mapping[int, SkipEvidence] | None = None,
) -> list[BadStep]:
    """Skipped steps and steps with non-finite gradients. ``firsts`` maps a step to the number of
    its non-finite parameters and the first of them in backward order; ``optimizers`` to whose step
    it is; ``evidence`` is what is known of the bad gradients."""
    causes = skip_causes(steps, optimizers, evidence)
    return [
        BadStep(s.step, s.scale, s.skipped, *firsts.get(s.step, (0, "")), causes.get(s.step))
        for s in steps
        if s.skipped or s.step in firsts
    ]


# What the trajectory of the loss scale says: where a search ended, and what still fails there.


HIGH_INIT = 2.0**32  # the highest start in common use, DeepSpeed's: an ordinary search
MANY_SKIPS = 16  # before the first step: more than a search from torch's 2^16 can take down to 1
LONG_SEARCH, LONG_SHARE = 5, 0.05  # skips, and their share of all steps: worth a sentence
MIN_LATE_SKIPS = 3
GROWS_TOO_FAST = 0.1  # share of skips after the search; torch's interval gives 0.0005


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


def scaler_made_at(run: RunView, scaler: str = "") -> str:
    """The line that makes the scaler, or the first one; "" where none was recorded."""
    made = (c for c in run.calls if c.name == "scaler_new" and scaler in ("", c.subject))
    return next((c.line for c in made), "")


def scale_set_at(run: RunView) -> str:
    """The line that decides about a scale that is too high: the ``update`` after which it is no
    lower although the step was skipped, or else the line that makes the scaler."""
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
        largest_taken=max(taken) if taken else None,
        refused=max(len(run.guarded_gradients) - len(falls), 0),
    )


def fits_unscaled(evidence: Evidence, factor: float) -> bool:
    """Whether the gradient that overflows first is within half precision once the ``factor`` at
    which it was seen is taken off it."""
    root = evidence.root
    if root is None or root.op.phase != "backward" or not root.op.fp32_finite:
        return False
    return root.op.fp32_max is not None and root.op.fp32_max / factor < FP16.max


def hand_scaled_at(run: RunView) -> str:
    """The line whose backward is of a loss that the script scales by hand; "" without one."""
    found = (c for c in run.calls if c.name == "backward" and (_hand_factor(c) or 0) > 1)
    return next((c.line for c in found if c.line), "")


def hand_factor_at(run: RunView, step: int) -> float | None:
    """What the loss of a step was multiplied by; None where it was by no constant."""
    found = (c for c in run.calls if c.name == "backward" and c.step == step)
    return next((factor for c in found if (factor := _hand_factor(c)) is not None), None)


def _hand_factor(call: Call) -> float | None:
    """What the root of a backward was multiplied by; None where it was by no constant."""
    name, _, text = call.note.partition(" ")
    return float(text) if text and name in ("mul", "mul_") else None


def fails_forward(evidence: Evidence) -> bool:
    """A non-finite loss: no scale can cure it."""
    run = evidence.baseline
    root = evidence.root
    if root is not None and root.op.phase == "backward":
        return False
    share = len(run.bad_loss_steps) / len(run.steps) if run.steps else 0.0
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


def scaled_by_hand(evidence: Evidence) -> float | None:
    """The constant whose product with the loss is itself the first non-finite value."""
    factor, root = static_scale(evidence.baseline), evidence.root
    if factor is None or root is None or root.arrives is not Arrives.LOSS:
        return None
    is_product = root.name in ("mul", "mul_") and factor in root.op.scalars
    return factor if is_product and root.op.total == 1 else None


def steps_at_scale_1(evidence: Evidence) -> bool:
    """With the scale held at 1 the scaler takes steps; False when that control was not run."""
    low = evidence.runs.get(SCALE_1)
    return low is not None and len(low.skips) < len(low.steps) and low.has_scaler
