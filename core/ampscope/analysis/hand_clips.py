"""Was the script clipping scaled gradients by its own hands?

A single change of the gradients says little: averaging over workers, masks, noise, centring and
unscaling by hand change them too. A clip is known by its limit. Whatever the gradients were, what
the limit bounds is the same afterwards: their norm, each parameter's norm, their largest entry. And
the limit is meant for unscaled gradients: it stays when the scale moves, or, while the scale stands
still, it is the round number of the two (1 and not 1 / 65,536).

A limit that is computed (a share of each unit's weight norm, say) has no such number. It is known
by the fp32 control, where the same code meets the same gradients unscaled and cuts next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ampscope.analysis.repeatability import difference
from ampscope.analysis.run_view import RunView
from ampscope.observations import GradientChange

MIN_CHANGES = 3  # two equal norms can be chance
SAME = 2e-3  # relative; a limit in bf16 is rounded at 2^-9
VARIES = 0.01  # the norm before must differ by this much, or a constant factor would look alike
MAX_UNSCALED_LIMIT = 0.01  # real gradients are not clipped to less; a limit above it may be scaled
DIGITS = 4
CUT = 0.1  # what is left of the gradients, at most, where fp32 keeps them
ALIKE = 2.0  # before the cut the gradients are fp32's within this factor


@dataclass(frozen=True, slots=True)
class HandClip:
    """A limit that scaled gradients were cut to."""

    optimizer: str
    bounds: str  # "norm", "norm of each parameter", "largest entry"
    limit: float
    changes: tuple[GradientChange, ...]


def hand_clips(changes: Sequence[GradientChange]) -> list[HandClip]:
    """At most one an optimizer."""
    found: list[HandClip] = []
    for optimizer in dict.fromkeys(c.optimizer for c in changes):
        own = tuple(c for c in changes if c.optimizer == optimizer)
        if len(own) >= MIN_CHANGES and all(c.norm_after <= c.norm_before for c in own):
            found += [
                HandClip(optimizer, bounds, limits[0], own)
                for bounds, read in _BOUNDS.items()
                if _is_limit(limits := [read(c) for c in own], own)
            ][:1]
    return found


def _norm(change: GradientChange) -> float:
    return change.norm_after if change.kind == "factor" else math.nan


def _each_norm(change: GradientChange) -> float:
    is_scaled = change.kind in ("factor", "factors") and change.each_norm is not None
    return change.each_norm if is_scaled and change.each_norm is not None else math.nan


def _largest(change: GradientChange) -> float:
    return change.max_after if change.kind in ("clamp", "factor") else math.nan


_BOUNDS: dict[str, Callable[[GradientChange], float]] = {
    "norm": _norm,
    "norm of each parameter": _each_norm,
    "largest entry": _largest,
}


def _is_limit(limits: list[float], changes: tuple[GradientChange, ...]) -> bool:
    if not _same(limits) or _same([c.norm_before for c in changes], VARIES):
        return False
    unscaled = [x / c.scale for x, c in zip(limits, changes, strict=True)]
    if not _same(unscaled):
        return True  # the scale moved and the limit did not follow
    is_tiny = unscaled[0] < MAX_UNSCALED_LIMIT
    return is_tiny and _digits(limits[0]) < _digits(unscaled[0])


def follows_scale(limits: Sequence[float], scales: Sequence[float]) -> bool:
    """Whether the limits of clips are those of unscaled gradients times the loss scale, as in
    ``clip_grad_norm_(parameters, max_norm * scaler.get_scale())``, which is right."""
    unscaled = [limit / scale for limit, scale in zip(limits, scales, strict=True)]
    if not _same(unscaled):
        return False
    if not _same(list(scales)):
        return True
    is_usual = unscaled[0] >= MAX_UNSCALED_LIMIT and scales[0] > 1
    return is_usual and _digits(unscaled[0]) < _digits(limits[0])


def cut_unlike_fp32(run: RunView, fp32: RunView | None) -> tuple[GradientChange, ...]:
    """Changes that left less than :data:`CUT` of scaled gradients, of which the fp32 control, at
    the same step, still has what was there before; none unless :data:`MIN_CHANGES` are found.

    The share that is left must vary: a constant one is a factor, such as a second unscaling.
    """
    if fp32 is None or difference(run, fp32):
        return ()
    found = [c for c in run.gradient_changes if c.scale > 1 and _is_cut(c, run, fp32)]
    shares = [c.norm_after / c.norm_before for c in found]
    return tuple(found) if len(found) >= MIN_CHANGES and not _same(shares, VARIES) else ()


def _is_cut(change: GradientChange, run: RunView, fp32: RunView) -> bool:
    own, other = (
        {
            g.name: g.norm or 0.0
            for g in view.gradients
            if (g.step, g.optimizer) == (change.step, change.optimizer)
        }
        for view in (run, fp32)
    )
    reduced = [name for name, norm in own.items() if norm < CUT * other.get(name, 0.0)]
    left = math.hypot(*(own[name] for name in reduced))
    kept = math.hypot(*(other[name] for name in reduced))
    before, after = change.norm_before / change.scale, change.norm_after / change.scale
    is_this_change = after > 0 and math.isclose(left, after, rel_tol=CUT)
    return is_this_change and after < CUT * kept and 1 / ALIKE < before / kept < ALIKE


def _same(values: list[float], tolerance: float = SAME) -> bool:
    if not all(map(math.isfinite, values)):
        return False
    return max(values) - min(values) <= tolerance * max(values)


def _digits(value: float) -> int:
    """Significant decimal digits of ``value``, rounded to :data:`DIGITS`: 1 for 0.5, 4 for 1/3."""
    mantissa = f"{value:.{DIGITS - 1}e}".partition("e")[0]
    return len(mantissa.replace(".", "").rstrip("0"))
