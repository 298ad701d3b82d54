"""Gradient entries that half precision lost: zero in the run, and not in its fp32 control.

The two runs have the same weights until the first step that is taken, so the comparison by
parameter is made there; later attempts are compared as shares.
"""

from __future__ import annotations

import math

from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import progress

MATTERS = 1e-2  # of the whole gradient's norm
SLOWER = 0.85  # of fp32's progress: less is slower learning
MOSTLY = 0.1  # share of zeros up to which fp32's gradient of a parameter counts as there
LATE = 5  # last attempts with finite gradients


def late_zero_share(run: RunView) -> float:
    """Exactly zero gradient entries in the last attempts with finite gradients."""
    seen = [a for a in run.attempts if not a.grad_nonfinite and a.grad_total][-LATE:]
    total = sum(a.grad_total for a in seen)
    return sum(a.grad_zero for a in seen) / total if total else 0.0


def dead_parameters(run: RunView, fp32: RunView) -> list[str]:
    """Parameters without any gradient here that in fp32 have a part of it that matters.

    A bias before a normalisation has a gradient of rounding noise in fp32 and none in half: the
    share of the total norm tells it from a loss.
    """
    reference = {g.name: g for g in fp32.gradients if g.norm and g.attempt == 0}
    total = math.sqrt(sum((g.norm or 0.0) ** 2 for g in reference.values()))
    # A skipped step says nothing: its gradients are infinite, or were made zero by a clip that
    # divided by an infinite norm.
    taken = (a.attempt for a in run.attempts if not a.skipped and not a.grad_nonfinite)
    first = next(taken, None)
    names = []
    for own in (g for g in run.gradients if g.attempt == first and g.total and not g.nonfinite):
        other = reference.get(own.name)
        if own.zero < own.total or other is None:
            continue
        if other.zero < MOSTLY * other.total and (other.norm or 0.0) > MATTERS * total:
            names.append(own.name)
    return names


def learns_slower(run: RunView, fp32: RunView) -> bool:
    """fp32 made progress within the steps that both made, and this run clearly less."""
    count = min(len(run.losses), len(fp32.losses))
    own, reference = progress(run, count), progress(fp32, count)
    return bool(reference and reference > 0 and (own is None or own < SLOWER * reference))
