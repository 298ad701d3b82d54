"""Are gradients still multiplied by the loss scale where they are used? The fp32 control tells.

Which methods a script called says how the scale was meant to go, not whether it went: a division by
hand, a hook on the parameters or ``reg * scaler.get_scale()`` are as right as GradScaler's own. In
the fp32 control the scaler is switched off, so that its losses and gradients carry no scale. What
is larger than there by about the scale carries it; what is alike does not:

    scale 65,536; norm at optimizer.step() 0.43, in fp32 0.44       -> unscaled by hand
    scale 65,536; norm at optimizer.step() 28,200, in fp32 0.44     -> still scaled

Also here: clips of scaled gradients by hand, and the call log cut into windows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ampscope.analysis.control_losses import difference
from ampscope.analysis.run_view import RunView
from ampscope.observations import Call, GradientChange

FIRST = 10  # pairs that are compared; later the two runs have gone different ways
MIN_SCALE = 16.0  # a smaller one cannot be distinguished from how two runs differ by themselves
AS_LARGE = 4.0  # two runs that have just begun differ by less than this factor


def steps_on_scaled(run: RunView, fp32: RunView | None, optimizer: str) -> bool | None:
    """Whether steps that the script called itself consumed gradients that are not as large as in
    fp32, by the norms that both runs had at the same steps: the scale was not taken out, or not
    the whole of it, or twice. None where that cannot be told."""
    alike = _alike(run, fp32, optimizer, direct=True)
    return None if alike is None else not alike


def scaler_steps_on_scaled(run: RunView, fp32: RunView | None, optimizer: str) -> bool | None:
    """Whether steps through the scaler, which divides by the scale in any case, were left with
    gradients as large as in fp32: they did carry it."""
    return _alike(run, fp32, optimizer, direct=False)


def _alike(run: RunView, fp32: RunView | None, optimizer: str, *, direct: bool) -> bool | None:
    if fp32 is None or typical_scale(run) < MIN_SCALE:
        return None
    other = {a.step: a.grad_norm for a in fp32.steps if a.optimizer == optimizer}
    own = [a for a in run.steps if a.optimizer == optimizer and bool(a.scaler) is not direct]
    usable = [(a.grad_norm, other.get(a.step)) for a in own if not a.grad_nonfinite]
    ratios = [x / y for x, y in usable if x and y and math.isfinite(x) and math.isfinite(y)]
    return _is_near(1.0, ratios[:FIRST])


def clips_scaled(run: RunView, fp32: RunView | None, line: str) -> bool | None:
    """Whether the clips of one line met scaled gradients, by the norms that they returned."""
    if fp32 is None:
        return None
    if typical_scale(run) < MIN_SCALE:
        return None
    alike = _is_near(1.0, _ratios(_values(run, "clip", line), _values(fp32, "clip", line)))
    return None if alike is None else not alike


def scales_by_hand(run: RunView, fp32: RunView | None, line: str) -> bool:
    """Whether the losses that a line calls backward on are fp32's times the loss scale."""
    if fp32 is None:
        return False
    ratios = _ratios(_values(run, "backward", line), _values(fp32, "backward", line))
    scale = typical_scale(run)
    return scale >= MIN_SCALE and _is_near(scale, ratios) is True


def losses_as_fp32(run: RunView, fp32: RunView | None, line: str) -> bool:
    """Whether the losses that a line calls backward on are as large as in fp32, where none that is
    finite there is lost here: whatever entered them carries no scale."""
    if fp32 is None or typical_scale(run) < MIN_SCALE:
        return False
    own, other = _values(run, "backward", line), _values(fp32, "backward", line)
    lost = [a for a, b in zip(own, other, strict=False) if _finite(b) and not _finite(a)]
    return not lost and _is_near(1.0, _ratios(own, other)) is True


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def typical_scale(run: RunView) -> float:
    """Median of the scales that losses were multiplied by; 1 when none was."""
    scales = [c.value for c in run.calls if c.name == "scale" and c.value]
    return statistics.median(scales) if scales else 1.0


def _values(run: RunView, name: str, line: str) -> list[float | None]:
    return [c.value for c in run.calls if (c.name, c.line) == (name, line) and not c.nested]


def _ratios(own: Iterable[float | None], other: Iterable[float | None]) -> list[float]:
    pairs = zip(own, other, strict=False)
    return [abs(a / b) for a, b in pairs if a and b and math.isfinite(a) and math.isfinite(b)][
        :FIRST
    ]


def _is_near(expected: float, ratios: list[float]) -> bool | None:
    if not ratios:
        return None
    return expected / AS_LARGE < statistics.median(ratios) < expected * AS_LARGE


# Was the script clipping scaled gradients by its own hands?
#
# A single change of the gradients says little: averaging over workers, masks, noise, centring and
# unscaling by hand change them too. A clip is known by its limit. Whatever the gradients were,
# what the limit bounds is the same afterwards: their norm, each parameter's norm, their largest
# entry. And the limit is meant for unscaled gradients: it stays when the scale moves, or, while
# the scale stands still, it is the round number of the two (1 and not 1 / 65,536).
#
# A limit that is computed (a share of each unit's weight norm, say) has no such number. It is
# known by the fp32 control, where the same code meets the same gradients unscaled and cuts next to
# nothing.


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


def _same(values: list[float], tolerance: float = SAME) -> bool:
    if not all(map(math.isfinite, values)):
        return False
    return max(values) - min(values) <= tolerance * max(values)


def _digits(value: float) -> int:
    """Significant decimal digits of ``value``, rounded to :data:`DIGITS`: 1 for 0.5, 4 for 1/3."""
    mantissa = f"{value:.{DIGITS - 1}e}".partition("e")[0]
    return len(mantissa.replace(".", "").rstrip("0"))


# The ordered call log cut into windows: what happened between two zero_grad calls.


@dataclass(frozen=True, slots=True)
class Window:
    """Top-level calls for one optimizer, up to and with its step."""

    optimizer: str
    calls: tuple[Call, ...]

    @property
    def backwards(self) -> list[Call]:
        """The backward passes whose gradients the step used."""
        return [c for c in self.calls if c.name == "backward"]


def windows(run: RunView) -> list[Window]:
    """One a step of each optimizer: the user's own calls since its last zero_grad or step."""
    found: list[Window] = []
    pending: dict[str, list[Call]] = {}
    names = {c.note for c in run.calls if c.name == "scaler_step"}
    names |= {c.subject for c in run.calls if c.name == "optimizer_step"}
    for name in names:
        pending[name] = []
    for call in run.calls:
        if call.nested:
            continue
        if call.name == "zero_grad":
            for name in names if call.subject == "model" else {call.subject} & names:
                pending[name] = []
            continue
        for name in names:
            pending[name].append(call)
        owner = call.note if call.name == "scaler_step" else call.subject
        if call.name in ("scaler_step", "optimizer_step") and owner in names:
            found.append(Window(owner, tuple(pending[owner])))
            pending[owner] = []
    return found


@dataclass(frozen=True, slots=True)
class Bypasses:
    """Steps that a scaler should have taken, and steps it took on what it had not scaled."""

    direct: tuple[Call, ...]  # optimizer.step on gradients of a scaled loss
    unscaled: tuple[Call, ...]  # scaler.step on gradients of a loss that was not scaled
    again: tuple[Call, ...] = ()  # of direct: without a backward since the step before
    after_unscale: tuple[Call, ...] = ()  # of direct: unscale_ came after the last backward
    mixed: tuple[Call, ...] = ()  # of unscaled: another loss of the same step was scaled


def _never(_: str) -> bool:
    return False


def bypasses(run: RunView, scaled_by_hand: Callable[[str], bool] = _never) -> Bypasses:
    """Steps at which scaled and unscaled went together, in the order of the log.
    ``scaled_by_hand`` says of a line whether the loss that it calls backward on is multiplied by
    the scale, though not by ``scaler.scale``."""
    direct: list[Call] = []
    unscaled: list[Call] = []
    again: list[Call] = []
    after_unscale: list[Call] = []
    mixed: list[Call] = []
    plain = {c.line for c in run.calls if c.name == "backward" and not c.scaled}
    by_hand = {line for line in plain if scaled_by_hand(line)}

    def is_scaled(backward: Call) -> bool:
        return backward.scaled or backward.line in by_hand

    last_scaled: dict[str, bool] = {}
    all_windows = windows(run)
    alone = len({w.optimizer for w in all_windows}) == 1
    for window in all_windows:
        step, backwards = window.calls[-1], window.backwards
        if backwards:
            # With several optimizers the last backward before a step is the one that is meant.
            last_scaled[window.optimizer] = is_scaled(backwards[-1])
        if step.name == "optimizer_step" and last_scaled.get(window.optimizer):
            direct.append(step)
            if not backwards:
                again.append(step)
            elif _unscales_last(window):
                after_unscale.append(step)
        elif step.name == "scaler_step" and backwards:
            some = any(map(is_scaled, backwards))
            if (alone and not all(map(is_scaled, backwards))) or not is_scaled(backwards[-1]):
                unscaled.append(step)
                mixed += [step] if some else []
    return Bypasses(*map(tuple, (direct, unscaled, again, after_unscale, mixed)))


def _unscales_last(window: Window) -> bool:
    """The optimizer's gradients were unscaled after the window's last backward."""
    last = max(n for n, c in enumerate(window.calls) if c.name == "backward")
    after = window.calls[last:]
    return any(c.name == "unscale_" and c.note == window.optimizer for c in after)
