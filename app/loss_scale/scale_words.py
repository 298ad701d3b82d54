"""Sentences of the Loss scale page, computed from the run."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.skips import BadStep
from ampscope.records import StepTotals
from app.loss_scale.scale_data import Trajectory
from app.text import cut, plural, share


def chart_seen(found: Trajectory) -> str:
    """Above the chart."""
    loss, norm = found.loss, found.norm
    text = "All panels share the axis of steps."
    if found.is_thinned or found.is_part:
        first, last = found.span
        text += f" Shown: steps {first:,} to {last:,}"
        text += (
            f", {len(found.steps):,} of them drawn: the extremes, every change of scale and the "
            "bad ones."
            if found.is_thinned
            else ", all of them."
        )
    if any(s.skipped for s in found.steps):
        text += " A cross on the scale is a skipped step."
    told = [
        f"{name} at {plural(s.nonfinite_count, 'step')}"
        for name, s in (("the loss", loss), ("the gradient norm", norm))
        if s.nonfinite_count
    ]
    if told:
        return f"{text} Not finite, and so in the band at the bottom: {' and '.join(told)}."
    return f"{text} Every recorded loss and gradient norm is finite."


def bad_steps_seen(found: Sequence[BadStep], totals: StepTotals, whole: int) -> str:
    """Above the table of skips: ``found`` are its rows, the newest of ``whole`` bad steps."""
    taken = [b for b in found if not b.skipped]
    if not found:
        if totals.bad:
            return "No step of the shown part was skipped, and no gradient held NaN or Inf."
        return "No step was skipped, and no gradient held NaN or Inf."
    text = f"{share(totals.skipped, totals.steps)} steps were skipped."
    if len(found) < whole:
        text += f" The newest {len(found):,} of {whole:,} bad steps of the shown part are listed."
    if taken:
        text += (
            f" At {plural(len(taken), 'step')} gradients held NaN or Inf and the optimizer ran all "
            "the same."
        )
    firsts = [b.first_parameter for b in found if b.first_parameter]
    if firsts:
        most = max(dict.fromkeys(firsts), key=firsts.count)
        often = "" if len(firsts) == 1 else f", at {firsts.count(most)} of {len(firsts)} such steps"
        text += f" Backward met {cut(most)} first{often}."
    return text
