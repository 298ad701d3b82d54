"""Trained weights that are themselves half precision, with no fp32 master copy beside them."""

from __future__ import annotations

import math

from ampscope.analysis.run_view import RunView


def half_weights(run: RunView) -> str:
    """Dtypes of the weights that the run's taken steps update, when half precision is among them
    and a gradient arrived; else ""."""
    taken = [a for a in run.attempts if not a.skipped]
    is_half = any("fp16" in a.weight_dtypes or "bf16" in a.weight_dtypes for a in taken)
    return taken[0].weight_dtypes if is_half and any(a.grad_norm for a in taken) else ""


KEPT = 0.5  # of the way that fp32's weights went


def kept_motion(run: RunView, fp32: RunView) -> float | None:
    """How far half-precision weights came over the whole run, as a share of the way in fp32; None
    when no displacements of the same weights were recorded.

    Many steps may each move few weights and still lose nothing: stochastic rounding moves one
    weight in ten by ten times the update, Kahan's compensation moves each at every tenth step. So
    displacements at the same places are projected on the direction that fp32 took:
    sum(d * sign(d32)) / sum(abs(d32)). It is 1 where rounding keeps the mean, whatever its noise,
    and 0 where updates are rounded away.
    """
    reference = {s.name: s for s in fp32.scans_of("end", "parameter")}
    along = length = 0.0
    for scan in run.scans_of("end", "parameter"):
        other = reference.get(scan.name)
        if other is None or scan.dtype not in ("fp16", "bf16"):
            continue
        if not scan.displacement or len(scan.displacement) != len(other.displacement):
            continue
        for own, full in zip(scan.displacement, other.displacement, strict=True):
            if math.isfinite(own) and math.isfinite(full):
                along += math.copysign(own, own * full) if full else 0.0
                length += abs(full)
    return along / length if length else None
