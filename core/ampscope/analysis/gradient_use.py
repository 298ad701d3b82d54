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
from ampscope.observations import Call

FIRST = 10  # pairs that are compared; later the two runs have gone different ways
MIN_SCALE = 16.0  # a smaller one cannot be told from how two runs differ by themselves
AS_LARGE = 4.0  # a loss is scaled by hand when it is fp32's times the scale, to this factor


def steps_on_scaled(run: RunView, fp32: RunView | None, optimizer: str) -> bool | None:
    """Whether steps that the script called itself consumed scaled gradients, by the norms that
    both runs had at the same attempts; None where that cannot be told."""
    return _is_scaled(run, fp32, optimizer, direct=True)


def scaler_steps_on_scaled(run: RunView, fp32: RunView | None, optimizer: str) -> bool | None:
    """The same of steps through the scaler, which divides by the scale in any case."""
    return _is_scaled(run, fp32, optimizer, direct=False)


def _is_scaled(run: RunView, fp32: RunView | None, optimizer: str, *, direct: bool) -> bool | None:
    if fp32 is None:
        return None
    other = {a.attempt: a.grad_norm for a in fp32.attempts if a.optimizer == optimizer}
    own = [a for a in run.attempts if a.optimizer == optimizer and bool(a.scaler) is not direct]
    usable = [a for a in own if not a.grad_nonfinite and _positive(a.grad_norm)]
    ratios = [
        ((a.grad_norm or 0.0) / (other[a.attempt] or 1.0), 1.0 if direct else a.scale)
        for a in usable
        if _positive(other.get(a.attempt))
    ][:FIRST]
    scale = typical_scale(run)
    if not ratios or scale < MIN_SCALE:
        return None
    # What the scaler divided is multiplied again: gradients as they were before it.
    return statistics.median(ratio * back for ratio, back in ratios) > math.sqrt(scale)


def clips_scaled(run: RunView, fp32: RunView | None, line: str) -> bool | None:
    """Whether the clips of one line met scaled gradients, by the norms that they returned."""
    if fp32 is None:
        return None
    ratios = _ratios(_values(run, "clip", line), _values(fp32, "clip", line))
    scale = typical_scale(run)
    return statistics.median(ratios) > math.sqrt(scale) if ratios and scale >= MIN_SCALE else None


def scales_by_hand(run: RunView, fp32: RunView | None, line: str) -> bool:
    """Whether the losses that a line calls backward on are fp32's times the loss scale."""
    if fp32 is None:
        return False
    ratios = _ratios(_values(run, "backward", line), _values(fp32, "backward", line))
    scale = typical_scale(run)
    if not ratios or scale < MIN_SCALE:
        return False
    return scale / AS_LARGE < statistics.median(ratios) < scale * AS_LARGE


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


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def lines_of(calls: Iterable[Call]) -> list[str]:
    """The lines of calls, each once, in order."""
    return list(dict.fromkeys(call.line for call in calls))
