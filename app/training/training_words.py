"""Sentences of the Training page, computed from the run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ampscope.analysis.ranks import FirstNonFinite
from ampscope.analysis.training import Training
from ampscope.records import Event, State, StepRecord
from ampscope.report.words.training import answer
from app.layout import KeyFigure
from app.text import duration, number, percent, plural, power_of_two


def answer_of_ranks(trainings: Sequence[Training], first: FirstNonFinite | None) -> str:
    """The page's sentence for a training of several ranks: what matters most comes first."""
    parts = [f"Rank {t.run.spec.rank} {_GONE[t.run.state]}" for t in trainings if _is_gone(t)]
    going = sum(t.run.state.is_active for t in trainings)
    if parts and going:
        rest = "the other goes on" if going == 1 else f"{going} others go on"
        parts = [f"{'; '.join(parts)}; {rest}."]
    else:
        parts = [f"{'; '.join(parts)}."] if parts else []
    if first is not None:
        return " ".join([*parts, first.sentence])
    furthest = max(trainings, key=lambda t: t.totals.last_step or -1)
    return " ".join([*parts, answer(furthest)])


def ranks_seen(trainings: Sequence[Training]) -> str:
    """Above the table: who is behind."""
    steps = [t.totals.last_step for t in trainings if t.totals.last_step is not None]
    if not steps:
        return "No rank has recorded a step yet."
    if min(steps) == max(steps):
        return f"All {plural(len(trainings), 'rank')} are at step {max(steps):,}."
    behind = [str(t.run.spec.rank) for t in trainings if t.totals.last_step == min(steps)]
    who = f"Rank {behind[0]} is" if len(behind) == 1 else f"Ranks {', '.join(behind)} are"
    return f"{who} furthest behind, at step {min(steps):,}; the first is at step {max(steps):,}."


def key_figures(training: Training) -> list[KeyFigure]:
    """Four numbers of one run."""
    last, totals = training.last or StepRecord(0), training.totals
    skips = f"{totals.skipped:,} of {totals.steps:,}" if last.scale is not None else "no scaler"
    share = training.run.overhead_share
    cost = "" if share is None else f"; ampscope took {percent(share)} more"
    time_s = last.step_time_s
    scale = "" if last.scale is None else f" at loss scale {power_of_two(last.scale)}"
    return [
        KeyFigure("Last step", f"{last.step:,}", f"{totals.steps:,} steps were recorded"),
        KeyFigure("Loss", number(last.loss), f"Of step {last.step:,}{scale}"),
        KeyFigure("Skips", skips, "Steps that GradScaler left out; all of them are counted"),
        KeyFigure(
            "Time of a step",
            "not recorded" if time_s is None else duration(time_s),
            f"Of step {last.step:,}, without ampscope's own time{cost}",
        ),
    ]


def chart_seen(training: Training) -> str:
    """Above the chart."""
    shown, whole = len(training.steps), training.totals.steps
    text = "All panels share the axis of steps."
    if shown < whole:
        text += (
            f" {shown:,} of {whole:,} steps are drawn: the extremes, every change of scale and the "
            "bad ones. Loss scale shows any part in full."
        )
    if training.totals.skipped:
        text += " A cross on the scale is a skipped step."
    if training.totals.nonfinite_losses + training.totals.nonfinite_norms:
        text += " What is not finite stands in the band at the bottom."
    return text


def histograms_seen(spans: Sequence[tuple[int, int]], every: int) -> str:
    """When histograms were taken."""
    if not spans:
        return "No histogram was taken: watch(every=10) takes them at every tenth step."
    summed = sum(first != last for first, last in spans)
    cadence = f"every {f'{every:,} steps' if every > 1 else 'step'} and " if every > 0 else ""
    single = [first for first, last in spans if first == last]
    if every > 0 and len(single) > 1 and (gap := single[-1] - single[-2]) > every:
        cadence = (
            f"every {every:,} steps at first, lately after {gap:,} steps, so that they take about "
            "1 % of the time, and "
        )
    older = f" {plural(summed, 'older one')} add up several steps each." if summed else ""
    return (
        f"Histograms were taken {cadence}right after bad steps; the newest is of step "
        f"{spans[-1][1]:,}.{older}"
    )


def replay_command(capsule: Event) -> str:
    """What to type; a path with a space in it stays one argument."""
    return f"ampscope replay {shlex.quote(capsule.path)} --model file.py:build"


_GONE = {State.LOST: "was lost", State.FAILED: "failed", State.CANCELLED: "was cancelled"}


def _is_gone(training: Training) -> bool:
    return training.run.state in _GONE
