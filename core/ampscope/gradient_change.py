"""What a script did to its own gradients between backward and the optimizer's step, as a record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GradientChange:
    """Gradients that still carried the loss scale and were changed or replaced, at one attempt.

    All numbers are of the gradients that changed, still scaled. ``kind``: factor (all were
    multiplied by the same number), factors (each parameter's by its own), clamp (cut at
    ``±max_after``), other (anything else: noise, masks, centring).
    """

    attempt: int
    optimizer: str  # "optimizer0"
    scale: float
    kind: str
    changed: int  # parameters
    norm_before: float  # 2-norm over all of them
    norm_after: float
    max_after: float
    each_norm: float | None  # 2-norm of every parameter's gradient after, where they are all equal
    line: str = ""  # the script's line that wrote the last of them, "train.py:41"
