"""Trained weights that are themselves half precision, with no fp32 master copy beside them."""

from __future__ import annotations

from ampscope.analysis.run_view import RunView


def half_weights(run: RunView) -> str:
    """Dtypes of the weights that the run's taken steps update, when half precision is among them
    and a gradient arrived; else ""."""
    taken = [a for a in run.attempts if not a.skipped]
    is_half = any("fp16" in a.weight_dtypes or "bf16" in a.weight_dtypes for a in taken)
    return taken[0].weight_dtypes if is_half and any(a.grad_norm for a in taken) else ""
