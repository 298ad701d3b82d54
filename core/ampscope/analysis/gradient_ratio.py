"""Powers of the loss scale in the gradients that an optimizer's step uses.

Scaled as often as unscaled, gradients are those of fp32. Scaled once more they are larger by the
scale, unscaled once more smaller by it, and so for all parameters of one optimizer, or for all that
one loss reaches:

    scale 65,536; norm at the step 6.7e-6, in fp32 0.44     -> unscaled twice
    scale 64;     norm at the step 28.1,   in fp32 0.44     -> scaled twice

The reference is the fp32 control, in which every scaler is off, at the same weights: those of the
first step. A factor that the script multiplies its loss by itself is in the control too; there the
reference is the gradient at the end of backward, over that factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.repeatability import difference
from ampscope.analysis.run_view import RunView
from ampscope.analysis.scale_facts import hand_factor_at
from ampscope.analysis.scaled_gradients import clips_scaled, typical_scale
from ampscope.observations import MIN_HAND_SCALE, GradientChange, OptimizerStep

SAME_BATCH = 1.5  # factor by which the norms of half and fp32 gradients of one batch may differ
OTHER_BATCH = 4.0  # the same of two batches, where a search for the scale came before
MATTERS = 1e-3  # of the whole norm: a smaller gradient may be rounding noise
EXACT = 1e-2  # relative: the script's own division is exact but for a rounding of each gradient
MIN_STEPS = 3  # that a factor by hand must be in
IS_RATE = 0.1  # relative
MOST = 2  # the largest power that is looked for


@dataclass(frozen=True, slots=True)
class ScaleLeft:
    """``power``: how often the scale is in the gradients of ``optimizer`` at ``step``: 1 not
    unscaled, or scaled twice; -1 unscaled twice, or never scaled. ``ratio`` is what they are
    over the reference. ``parameters`` is empty where all of the optimizer's are concerned. ``line``
    is the script's own line that divided or multiplied the gradients, "" where none is known.
    ``goes_on``: the optimizer's step is longer or shorter by it, as Adam's is not."""

    optimizer: str
    step: int
    scale: float
    power: int
    ratio: float
    parameters: tuple[str, ...]
    line: str
    goes_on: bool
    by_hand: bool = False


def scale_left(run: RunView, fp32: RunView | None) -> ScaleLeft | None:
    """The first optimizer whose gradients carry a power of the loss scale other than 0; None where
    none does, or where that cannot be told."""
    if not run.has_scaler:
        return _by_hand(run)
    if fp32 is None or difference(run, fp32):
        return None
    limited = {c.line for c in run.calls if c.name == "clip" and c.scaled}
    if any(clips_scaled(run, fp32, line) is not False for line in limited):
        return None  # a clip that meets the scale leaves its limit over the scale
    first: dict[str, OptimizerStep] = {}
    for record in run.steps:
        if not (record.skipped or record.grad_nonfinite) and record.grad_norm:
            first.setdefault(record.optimizer, record)
    found = (_of_optimizer(run, fp32, own) for own in first.values())
    return next((left for left in found if left is not None), None)


def _of_optimizer(run: RunView, fp32: RunView, own: OptimizerStep) -> ScaleLeft | None:
    scale = own.scale if own.scaler else typical_scale(run)
    other = next((a for a in fp32.steps if a.optimizer == own.optimizer), None)
    apart = OTHER_BATCH if run.leading_skips else SAME_BATCH
    if other is None or scale <= apart**2 or other.grad_nonfinite or not other.grad_norm:
        return None
    changes = [c for c in run.gradient_changes if c.optimizer == own.optimizer]
    if any(not _divides_by_the_scale(c) for c in changes):
        return None  # a clip or a mask of the script's own
    powers = _powers(run, fp32, own, other, scale, apart)
    if len({*powers.values()}) > 1:  # of some parameters: what half flushes to zero is no power
        powers = _powers(run, fp32, own, other, scale, SAME_BATCH)
    concerned = {name: power for name, power in powers.items() if power}
    if not concerned or None in powers.values() or len({*concerned.values()}) > 1:
        return None
    power = next(iter(concerned.values()))
    assert power is not None
    return ScaleLeft(
        own.optimizer,
        own.step,
        scale,
        power,
        (own.grad_norm or 0.0) / other.grad_norm,
        () if len(concerned) == len(powers) else tuple(concerned),
        next((c.line for c in changes if c.line), "") if power < 0 else "",
        _changes_the_step(own, other, apart)
        if len(concerned) == len(powers)
        else _goes_by_the_gradient(other),
    )


def _powers(
    run: RunView,
    fp32: RunView,
    own: OptimizerStep,
    other: OptimizerStep,
    scale: float,
    apart: float,
) -> dict[str, int | None]:
    """Power of the scale in each parameter's gradient that matters; None where it is no power. The
    whole gradient's under the name "" where single ones were not kept."""
    norms, references = (
        {g.name: g.norm for g in view.gradients if (g.step, g.optimizer) == (a.step, a.optimizer)}
        for view, a in ((run, own), (fp32, other))
    )
    least = MATTERS * (other.grad_norm or 0.0)
    pairs = {
        name: (norms[name], reference)
        for name, reference in references.items()
        if reference and reference > least and norms.get(name)
    }
    if not pairs:
        pairs = {"": (own.grad_norm, other.grad_norm or 1.0)}
    return {name: _power((a or 0.0) / b, scale, apart) for name, (a, b) in pairs.items()}


def _power(ratio: float, scale: float, apart: float) -> int | None:
    if not ratio or not math.isfinite(ratio):
        return None
    power = round(math.log(ratio) / math.log(scale))
    rest = abs(math.log(ratio) - power * math.log(scale))
    return power if abs(power) <= MOST and rest <= math.log(apart) else None


def _divides_by_the_scale(change: GradientChange) -> bool:
    if change.kind != "factor" or not change.norm_after:
        return False
    return abs(change.norm_before / change.norm_after / change.scale - 1) <= EXACT


def _changes_the_step(own: OptimizerStep, other: OptimizerStep, apart: float) -> bool:
    """Whether the weights went another way than the control's, by more than batches differ."""
    if not own.update_norm or not other.update_norm:
        return bool(own.update_norm) is not bool(other.update_norm)
    return abs(math.log(own.update_norm / other.update_norm)) > math.log(apart)


def _by_hand(run: RunView) -> ScaleLeft | None:
    """Of a loss that the script multiplies by a constant and whose gradients it divides by the
    constant twice. What it does not divide at all may be a weight of the loss."""
    seen = [
        (a, factor, a.grad_norm / (a.backward_norm / factor))
        for a in run.steps
        if a.grad_norm and a.backward_norm and math.isfinite(a.backward_norm)
        for factor in [hand_factor_at(run, a.step)]
        if factor is not None and factor >= MIN_HAND_SCALE
    ]
    if len(seen) < MIN_STEPS or any(abs(r * f - 1) > EXACT for _, f, r in seen):
        return None
    own, factor, ratio = seen[0]
    follows = _goes_by_the_gradient(own)
    return ScaleLeft(own.optimizer, own.step, factor, -1, ratio, (), "", follows, by_hand=True)


def _goes_by_the_gradient(step: OptimizerStep) -> bool:
    """Its length is the learning rate times the gradient, as SGD's first step is."""
    expected = step.lr * (step.grad_norm or 0.0)
    return abs((step.update_norm or 0.0) - expected) <= IS_RATE * expected
