"""How far the numbers of a run grew before they broke: divergence grows, one bad value does not."""

from __future__ import annotations

import math

from ampscope.analysis.run_view import RunView

EARLY = (0, 1)  # attempts at which only a growth within the step, over time-steps, can break fp32
BEYOND = 1e30  # a product of this size within one forward pass, near fp32's end of 3.4e38
WITHIN_A_STEP = 1e6  # the growth that is put down for it


def growth(run: RunView, until: int | None = None) -> float:
    """Largest finite loss or gradient norm up to attempt ``until`` over the first one."""
    grown = [1.0]
    seen = [a for a in run.attempts if until is None or a.attempt <= until]
    for series in ([a.loss for a in seen], [a.grad_norm for a in seen]):
        finite = [abs(x) for x in series if x is not None and math.isfinite(x)]
        if len(finite) > 1 and finite[0] > 0:
            grown.append(max(finite) / finite[0])
    in_time = any(b.dtype == "fp32" and (b.fp32_max or 0) > BEYOND for b in run.bad_ops)
    if in_time and run.first_bad_attempt in EARLY:
        grown.append(WITHIN_A_STEP)
    return max(grown)
