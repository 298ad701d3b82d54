"""How a training stands, in one sentence; what the loss scaler did, in another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ampscope.analysis.scale_summary import SETTLED_STEPS, Pattern, ScaleSummary
from ampscope.analysis.training import FiniteParts, Training
from ampscope.number_words import duration, number, percent, plural, power_of_two, share
from ampscope.records import State, StepRecord, StepTotals
from ampscope.story.document import Figure

ALARM_NAMES = {
    "nonfinite_loss": "loss not finite",
    "nonfinite_gradient": "gradient not finite",
    "nonfinite_weight": "weight not finite",
    "zero_gradients": "gradients all zero",
    "loss_spike": "loss jumped",
    "stalled_weights": "weights stagnated",
    "scale_collapse": "loss scale collapsed",
    "skips_in_a_row": "skips in a row",
    "lost_share": "gradients lost",
    "weights_not_moving": "weights do not move",
}
_HEALTHY = {
    State.QUEUED: "Healthy so far",
    State.RUNNING: "Healthy so far",
    State.FINISHED: "Healthy to the end",
    State.CANCELLED: "Healthy until it was cancelled",
    State.FAILED: "Finite until it failed",
    State.LOST: "Finite until it was lost",
}
_ALARMED = {State.QUEUED: "Finite so far", State.RUNNING: "Finite so far"}


def answer(training: Training) -> str:
    """Whether one run is well, and how far it is."""
    if training.bad_since is not None:
        return f"Bad since step {training.bad_since:,}: {_what_is_bad(training)}."
    alarms = training.of("alarm")
    state = training.run.state
    start = _HEALTHY[state]
    if training.of("nonfinite"):
        start = _recovered(training)
    elif alarms:
        newest = alarms[-1]
        name = ALARM_NAMES.get(newest.name, newest.name)
        start = _ALARMED.get(state, _HEALTHY[state].replace("Healthy", "Finite"))
        start += f", with {plural(len(alarms), 'alarm')} (the last at step {newest.step:,}: {name})"
    return f"{start}: {progress(training)}."


def key_figures(training: Training) -> list[Figure]:
    """Four numbers of one run."""
    last, totals = training.last or StepRecord(0), training.totals
    skips = f"{totals.skipped:,} of {totals.steps:,}" if last.scale is not None else "no scaler"
    share = training.run.overhead_share
    cost = "" if share is None else f"; ampscope took {percent(share)} more"
    time_s = last.step_time_s
    scale = "" if last.scale is None else f" at loss scale {power_of_two(last.scale)}"
    return [
        Figure("Last step", f"{last.step:,}", f"{totals.steps:,} steps were recorded"),
        Figure("Loss", number(last.loss), f"Of step {last.step:,}{scale}"),
        Figure("Skips", skips, "Steps that GradScaler left out; all of them are counted"),
        Figure(
            "Time per step",
            "not recorded" if time_s is None else duration(time_s),
            f"Of step {last.step:,}, without ampscope's own time{cost}",
        ),
    ]


def _recovered(training: Training) -> str:
    """``Went bad at step 30 and recovered``"""
    steps = sorted({event.step for event in training.of("nonfinite")})
    times = f"{len(steps)} times, the last one " if len(steps) > 1 else ""
    start = f"Went bad {times}at step {steps[-1]:,}"
    gone = {State.FAILED: "failed later", State.LOST: "was lost later"}.get(training.run.state)
    return f"{start}, recovered, and {gone}" if gone else f"{start} and recovered"


def progress(training: Training) -> str:
    """``step 4,210, loss 2.31, 3 skips in all, last at step 12``"""
    last = training.last
    if last is None:
        return "no step has come yet"
    parts = [f"step {last.step:,}"]
    parts += [f"loss {number(last.loss)}"] if last.loss is not None else []
    skipped, bad_losses = training.totals.skipped, training.totals.nonfinite_losses
    if skipped:
        parts += [f"{plural(skipped, 'skip')} in all"]
        parts += [f"last at step {training.last_skip:,}"] if training.last_skip is not None else []
    elif last.scale is not None:
        parts.append("no skip")
    if bad_losses:
        parts.append(f"the loss was not finite at {plural(bad_losses, 'step')}")
    return ", ".join(parts)


def _what_is_bad(training: Training) -> str:
    since = training.bad_since
    shown = [s for s in training.steps if since is not None and s.step >= since]
    loss = next((s.loss for s in shown if s.loss is not None and not math.isfinite(s.loss)), None)
    if loss is not None:
        text = f"the loss was {number(loss)}"
    elif all(s.skipped for s in shown):
        text = "GradScaler leaves out every step"
    else:
        text = "gradients were not finite and the optimizer stepped anyway"
    steps = {e.step for e in training.of("capsule") if since is not None and e.step >= since}
    if not steps:
        return text
    which = "that step" if min(steps) == since else f"step {min(steps):,}"
    return f"{text}; the capsule of {which} shows where it came from"


def scale_answer(summary: ScaleSummary, totals: StepTotals, loss: FiniteParts) -> str:
    """What the loss scaler did over the whole run: the skips, what they are, and where the scale
    stands. ``loss`` is of the shown steps."""
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


def scale_figures(
    summary: ScaleSummary, totals: StepTotals, loss: FiniteParts, steps: Sequence[StepRecord]
) -> list[Figure]:
    """Four numbers of the whole run; ``loss`` is of the shown ``steps``."""
    nonfinite = (
        f"Of the shown steps: NaN {len(loss.nan_steps)}, +Inf {len(loss.pos_inf_steps)}, "
        f"-Inf {len(loss.neg_inf_steps)}"
    )
    left = f"{share(totals.skipped, totals.steps)} steps left the weights as they were"
    return [
        Figure("Skipped steps", f"{totals.skipped:,} of {totals.steps:,}", left),
        _scale_figure(summary.last_scale),
        Figure("Growths", f"{len(summary.growths):,}", _growth_note(steps)),
        Figure("Losses not finite", f"{totals.nonfinite_losses:,}", nonfinite),
    ]


def _scale_figure(scale: float | None) -> Figure:
    if scale is None:
        return Figure("Scale at the end", "none", "This run has no GradScaler")
    value = power_of_two(scale)
    return Figure("Scale at the end", value, f"{value} = {scale:,.10g}, used in the last step")


def _growth_note(steps: Sequence[StepRecord]) -> str:
    known = [s.growth_counter for s in steps if s.growth_counter is not None]
    if not known:
        return "Steps that ran at a larger scale than the step before"
    return f"{plural(known[-1], 'finite step')} since the last growth or skip (growth counter)"


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
