"""Sentences of the Loss scale page, computed from the run."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.loss_scale import SETTLED_STEPS, FiniteParts, Pattern, ScaleSummary
from ampscope.analysis.skips import BadStep
from ampscope.records import StepTotals
from app.scale_data import Trajectory
from app.text import cut, plural, power_of_two, share


def answer(summary: ScaleSummary, totals: StepTotals, loss: FiniteParts) -> str:
    """The page's sentence on the whole run: the skips, what they are, and where the scale stands.
    ``loss`` is of the shown steps."""
    hopeless = (
        summary.pattern is Pattern.SEARCH and summary.good_since == 0 and totals.nonfinite_losses
    )
    parts = [_in_vain(summary) if hopeless else _SKIPS[summary.pattern](summary, totals.skipped)]
    if summary.pattern is not Pattern.NO_SCALER:
        parts.append(_scale(summary))
    if totals.nonfinite_losses:
        text = f"the loss was not finite at {plural(totals.nonfinite_losses, 'step')}"
        shown = (*loss.nan_steps, *loss.pos_inf_steps, *loss.neg_inf_steps)
        parts.append(f"{text}, first at step {min(shown)}" if shown else text)
    return "; ".join(parts) + "."


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


def _no_scaler(summary: ScaleSummary, skipped: int) -> str:
    return f"No loss scale was used in {plural(summary.step_count, 'step')}"


def _none(summary: ScaleSummary, skipped: int) -> str:
    return f"No step of {summary.step_count:,} was skipped"


def _search(summary: ScaleSummary, skipped: int) -> str:
    skips, length = plural(summary.search_skips, "skip"), summary.search_steps
    if summary.good_since == 0:
        return f"{skips} in the first {plural(length, 'step')}: still searching for a scale"
    first = "the first step" if length == 1 else f"the first {length} steps"
    then = "then none" if summary.good_since >= SETTLED_STEPS else "then none so far"
    return f"{skips} in {first}, {then}: the scale search"


def _in_vain(summary: ScaleSummary) -> str:
    skips = plural(summary.search_skips, "skip")
    steps = plural(summary.search_steps, "step")
    return f"{skips} in the first {steps}, and the loss itself is not finite: no scale cures that"


def _after_growth(summary: ScaleSummary, skipped: int) -> str:
    later = skipped - summary.search_skips
    after = f" after the search of {plural(summary.search_steps, 'step')}" * bool(
        summary.search_skips
    )
    return f"{plural(later, 'skip')}{after}, each right after the scale grew: it tests the ceiling"


def _recurring(summary: ScaleSummary, skipped: int) -> str:
    skips, last = plural(skipped, "skip"), f"step {summary.skips[-1]}"
    where = f"at {last}" if skipped == 1 else f"the last at {last}"
    return f"{skips} in {plural(summary.step_count, 'step')}, {where}"


def _never_ending(summary: ScaleSummary, skipped: int) -> str:
    return (
        f"{plural(skipped, 'skip')} in {plural(summary.step_count, 'step')}, and no "
        "step was taken any more at the end: the scale cannot cure this"
    )


def _scale(summary: ScaleSummary) -> str:
    if summary.first_scale is None or summary.last_scale is None:
        return "no scale was recorded"
    last = power_of_two(summary.last_scale)
    if summary.first_scale == summary.last_scale and not summary.skips and not summary.growths:
        return f"the scale stayed at {last}"
    grew = f", after {plural(len(summary.growths), 'growth')}" if summary.growths else ""
    return f"{'steady scale' if summary.is_steady else 'the scale is now'} {last}{grew}"


_SKIPS = {
    Pattern.NO_SCALER: _no_scaler,
    Pattern.NONE: _none,
    Pattern.SEARCH: _search,
    Pattern.AFTER_GROWTH: _after_growth,
    Pattern.RECURRING: _recurring,
    Pattern.NEVER_ENDING: _never_ending,
}
