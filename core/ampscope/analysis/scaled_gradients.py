"""Are gradients still multiplied by the loss scale where they are used? The fp32 control tells.

Which methods a script called says how the scale was meant to go, not whether it went: a division by
hand, a hook on the parameters or ``reg * scaler.get_scale()`` are as right as GradScaler's own. In
the fp32 control the scaler is switched off, so that its losses and gradients carry no scale. What
is larger than there by about the scale carries it; what is alike does not:

    scale 65,536; norm at optimizer.step() 0.43, in fp32 0.44       -> unscaled by hand
    scale 65,536; norm at optimizer.step() 28,200, in fp32 0.44     -> still scaled
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from ampscope.analysis.run_view import RunView

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
    usable = [a for a in own if not a.grad_nonfinite]
    norms = [a.grad_norm for a in usable]
    return _is_near(1.0, _ratios(norms, [other.get(a.step) for a in usable]))


def clips_scaled(run: RunView, fp32: RunView | None, line: str) -> bool | None:
    """Whether the clips of one line met scaled gradients, by the norms that they returned."""
    if fp32 is None or typical_scale(run) < MIN_SCALE:
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
    finite = [[a is not None and math.isfinite(a) for a in losses] for losses in (own, other)]
    lost = any(there and not here for here, there in zip(*finite, strict=False))
    return not lost and _is_near(1.0, _ratios(own, other)) is True


def typical_scale(run: RunView) -> float:
    """Median of the scales that losses were multiplied by; 1 when none was."""
    scales = [c.value for c in run.calls if c.name == "scale" and c.value]
    return statistics.median(scales) if scales else 1.0


def _values(run: RunView, name: str, line: str) -> list[float | None]:
    return [c.value for c in run.calls if (c.name, c.line) == (name, line) and not c.nested]


def _ratios(own: Iterable[float | None], other: Iterable[float | None]) -> list[float]:
    pairs = zip(own, other, strict=False)
    found = [abs(a / b) for a, b in pairs if a and b and math.isfinite(a) and math.isfinite(b)]
    return found[:FIRST]


def _is_near(expected: float, ratios: list[float]) -> bool | None:
    if not ratios:
        return None
    return expected / AS_LARGE < statistics.median(ratios) < expected * AS_LARGE
