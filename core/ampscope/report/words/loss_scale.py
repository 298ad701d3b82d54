"""What the loss scaler did over a run, in one sentence: the skips, and where the scale stands."""

from __future__ import annotations

from ampscope.analysis.loss_scale import SETTLED_STEPS, FiniteParts, Pattern, ScaleSummary
from ampscope.records import StepTotals
from ampscope.report.words.numbers import plural, power_of_two


def answer(summary: ScaleSummary, totals: StepTotals, loss: FiniteParts) -> str:
    """On the whole run: the skips, what they are, and where the scale stands.
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
