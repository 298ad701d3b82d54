"""The page Training: how a watched run and the ranks of a distributed one stand, what went wrong,
its curves, and what it reported.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import streamlit as st

from ampscope.analysis.ranks import FirstNonFinite, first_nonfinite
from ampscope.analysis.training import Training, training_of
from ampscope.errors import AmpscopeError
from ampscope.records import Event, Role, RunInfo, StepRecord, StepTotals
from ampscope.story.palette import MEASURE, OTHER_DTYPE
from ampscope.story.training_words import ALARM_NAMES, answer, key_figures
from app import chart, links, options, permissions, states, store
from app.figures.training import DrawnCurve, control_losses, training_curves
from app.runs import diagnoses, workload_choice
from app.text import escape, number, plural, power_of_two

AT_FIRST = 5  # alarms and capsules that are shown without being asked for
_COMMANDS = (
    "The first command runs the step again and names its first bad op. The second one gives the "
    "whole verdict and tries the fix on the step. Both import the file that you name, whose "
    "function returns the model; the dashboard itself imports none."
)
_MISSING = (
    "This file is not on the machine that runs the dashboard: run the command where the training "
    "ran, or copy the file. A run keeps a limited number of capsules."
)
MOST_POINTS, FEWEST_POINTS = 1000, 100  # of a run's curve; of each of very many ranks
LIVE_POINTS = 400  # of a run's curve that is sent anew with each of its ticks
MOST_CURVES = 16  # more cannot be distinguished; the table has every rank
DASHES = ("solid", "dash", "dot", "dashdot")
RANKS_TABLE_PX = 420


def read(run: RunInfo, ranks: int = 1) -> Training:
    """In a time that does not depend on how long the run is."""
    most = LIVE_POINTS if run.state.is_active else MOST_POINTS
    points = max(FEWEST_POINTS, most // ranks)
    steps, totals, events = list[StepRecord](), StepTotals(), list[Event]()
    with states.contained():  # each says for itself that it is damaged
        steps = store.steps(run, points=points)
    with states.contained():
        totals = store.totals(run)
    with states.contained():
        events = store.events(run)
    return training_of(run, steps, totals, events)


def read_ranks(ranks: Sequence[RunInfo]) -> list[Training]:
    """Each rank, in so few points that all together stay quick."""
    return [read(run, len(ranks)) for run in ranks]


def show_ranks(trainings: Sequence[Training]) -> None:
    """Sentence, key figures, table and losses."""
    reported = {t.run.spec.rank: t.events for t in trainings}
    first = first_nonfinite(reported)
    chart.sentence(answer_of_ranks(trainings, first))
    furthest = max(trainings, key=lambda t: t.totals.last_step or -1)
    chart.key_figures(key_figures(furthest))
    st.caption(f"Loss, skips and time of a step are those of rank {furthest.run.spec.rank}.")
    st.subheader("Ranks side by side", anchor=False)
    chart.see(ranks_seen(trainings))
    table = ranks_table(trainings, reported)
    chart.table(table, "ranks", key="training-ranks", most_px=RANKS_TABLE_PX)
    _losses(trainings, first)


def answer_of_ranks(trainings: Sequence[Training], first: FirstNonFinite | None) -> str:
    """The page's sentence for a training of several ranks: what matters most comes first."""
    gone = [t.run for t in trainings if t.run.state in states.ENDED]
    parts = [f"Rank {run.spec.rank} {states.ENDED[run.state]}" for run in gone]
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


def ranks_table(trainings: Sequence[Training], reported: dict[int, list[Event]]) -> pd.DataFrame:
    """One row per rank."""
    firsts = {rank: _first(events) for rank, events in reported.items()}
    return pd.DataFrame(
        {
            "Rank": [t.run.spec.rank for t in trainings],
            "State": [str(t.run.state) for t in trainings],
            "Last step": [t.totals.last_step for t in trainings],
            "Last loss": [number(t.last.loss) if t.last else "none yet" for t in trainings],
            "Loss scale": [
                "none" if t.totals.last_scale is None else power_of_two(t.totals.last_scale)
                for t in trainings
            ],
            "Skips": [t.totals.skipped for t in trainings],
            "First not finite": [firsts[t.run.spec.rank] for t in trainings],
            "Machine": [t.run.machine.host if t.run.machine else "" for t in trainings],
            "How it ended": [t.run.message for t in trainings],
        }
    )


def _first(events: Sequence[Event]) -> str:
    """Step and place of the first value that was not finite."""
    found = [e for e in events if e.kind == "nonfinite"]
    if not found:
        return "never"
    first = min(found, key=lambda e: e.step)
    return f"step {first.step:,}, {first.name}"


def _losses(trainings: Sequence[Training], first: FirstNonFinite | None) -> None:
    """All losses; those that went bad first stand out and are never left out."""
    culprits = set(first.ranks) if first is not None else set()
    ordered = sorted(trainings, key=lambda t: t.run.spec.rank not in culprits)
    drawn = [t for t in ordered if any(s.loss is not None for s in t.steps)][:MOST_CURVES]
    if not drawn:
        return
    drawn.sort(key=lambda t: t.run.spec.rank)
    few = f"{len(drawn)} of {len(trainings)} ranks, of their own batches."
    text = f"The loss of {few if len(drawn) < len(trainings) else 'each rank, of its own batches.'}"
    if culprits and len(culprits) < len(drawn):
        named = ", ".join(map(str, sorted(culprits)))
        text += f" In blue: rank {named}, which went non-finite first; the others are grey."
    chart.see(text)
    curves = [
        DrawnCurve(
            f"rank {t.run.spec.rank}",
            t.loss,
            MEASURE if not culprits or t.run.spec.rank in culprits else OTHER_DTYPE,
            DASHES[place % len(DASHES)],
        )
        for place, t in enumerate(drawn)
    ]
    versions = tuple(store.version(t.run) for t in trainings)
    figure = store.drawn(
        trainings[0].run, f"ranks-loss{versions}", lambda: control_losses(curves, x_title="step")
    )

    def table() -> pd.DataFrame:
        rows = [
            (t.run.spec.rank, s.step, s.loss, s.scale, s.skipped) for t in drawn for s in t.steps
        ]
        return pd.DataFrame(rows, columns=["rank", "step", "loss", "loss_scale", "skipped"])

    chart.show(figure, "ranks-loss", table, key="ranks-loss")


def show_overview(training: Training) -> None:
    """The sentence and the key figures of a single run."""
    chart.sentence(answer(training))
    chart.key_figures(key_figures(training))


def show_alarms(trainings: Sequence[Training]) -> None:
    """The newest alarms; each says what to do."""
    found = _events(trainings, "alarm")
    if not found:
        return
    st.subheader(f"Alarms ({len(found)})", anchor=False)
    for training, event in found[:AT_FIRST]:
        name = ALARM_NAMES.get(event.name, event.name)
        where = escape(f"Step {event.step:,}{_of_rank(training, trainings)}: {name}.")
        st.warning(f"**{where}** {escape(alarm_text(event))}")
    if found[AT_FIRST:]:
        with chart.details(plural(len(found) - AT_FIRST, "earlier alarm")):
            _events_table(found[AT_FIRST:], "alarms")


def alarm_text(event: Event) -> str:
    """What an alarm says, without its place and the capsule with its command, which the page
    shows beside it."""
    text = event.text.partition(" Capsule: ")[0]
    return re.sub(rf" Rank \d+, step {event.step}\.", "", text)


def show_capsules(trainings: Sequence[Training]) -> None:
    """What was kept of failing steps, and how to run it again."""
    found = _events(trainings, "capsule")[::-1]  # the first is nearest to the cause
    if not found:
        return
    st.subheader(f"Capsules ({len(found)})", anchor=False)
    chart.see(
        "A capsule keeps a failing step. The command runs it again beside fp32 and names the first "
        "bad op; put your own file and the function that builds your model in it."
    )
    for training, event in found[:AT_FIRST]:
        _capsule(training, event, trainings)
    if found[AT_FIRST:]:
        with chart.details(plural(len(found) - AT_FIRST, "later capsule")):
            for training, event in found[AT_FIRST:]:
                _capsule(training, event, trainings)
    if permissions.is_trusted():
        _diagnose_here(
            {
                event.path: (training, f"Step {event.step:,}{_of_rank(training, trainings)}")
                for training, event in found
                if not training.run.spec.imported and _is_here(event.path)
            }
        )


def _capsule(training: Training, event: Event, trainings: Sequence[Training]) -> None:
    with st.container(border=True, gap="small"):
        where = escape(f"Step {event.step:,}{_of_rank(training, trainings)}")
        st.markdown(f"**{where}.** {escape(event.text)}")
        for replayed in training.of("replay"):
            if replayed.step == event.step:
                st.markdown(f"**{escape('Run again:')}** {escape(replayed.text)}")
        path = shlex.quote(event.path)
        for command in (
            f"ampscope replay {path} --model file.py:build",
            f"ampscope diagnose --capsule {path} --trust file.py:build",
        ):
            st.code(command, language="bash", wrap_lines=True)
        st.caption(_COMMANDS)
        if not _is_here(event.path):
            st.caption(_MISSING)


def _diagnose_here(capsules: Mapping[str, tuple[Training, str]]) -> None:
    """Start ``ampscope diagnose --capsule`` for one of these files (path: training, title). The
    browser names one of the listed files, a function and its trust, and no code."""
    if not capsules:
        return
    for path, (_, title) in capsules.items():
        if diagnoses.job_is_running(path):
            st.info(f"**{escape(title)} is being diagnosed.** Its verdict comes to:")
            links.link(links.DIAGNOSIS)
        elif problem := diagnoses.job_problem(path):
            st.error(f"**{escape(title)} could not be diagnosed.** {escape(problem)}")
    folder = options.current().scripts
    files = workload_choice.listed(folder).files
    if not files:
        st.caption("To diagnose a capsule from here, start the dashboard with `--scripts DIR`.")
        return
    with (
        st.expander("Diagnose a capsule", icon=":material/play_arrow:"),
        st.form("tr-capsule", border=False),
    ):
        path = st.selectbox(
            "Capsule", list(capsules), format_func=lambda p: capsules[p][1], key="tr-capsule-path"
        )
        left, right = st.columns(2)
        file = left.selectbox("File that builds the model", files, key="tr-capsule-file")
        function = right.text_input("Its function", "build", key="tr-capsule-function")
        trusted = st.checkbox(
            "I trust this file: a process of its own imports and runs it.", key="tr-capsule-trust"
        )
        busy = bool(diagnoses.busy_with())
        if st.form_submit_button("Diagnose", disabled=busy, key="tr-capsule-start"):
            try:
                code = workload_choice.python_file(folder, file, "scripts")
                run = capsules[path][0].run
                diagnoses.start_captured(run, Path(path), code, function.strip(), trusted=trusted)
            except AmpscopeError as error:
                st.error(escape(str(error)))
            else:
                st.rerun()


def _is_here(path: str) -> bool:
    """A path from a run may be anything: too long for a file, or no name at all."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def show_curves(training: Training) -> None:
    """The chart over all steps."""
    rank = f", rank {training.run.spec.rank}" if training.run.spec.world > 1 else ""
    st.subheader(f"Over all steps{rank}", anchor=False)
    chart.see(chart_seen(training))
    spans = step_spans(training.run)
    figure = store.drawn(
        training.run,
        "training-curves",
        lambda: training_curves(training.steps, training.loss, training.norm, spans),
    )

    def table() -> pd.DataFrame:
        return pd.DataFrame([dataclasses.asdict(s) for s in training.steps])

    chart.show(figure, "training", table, key="training")
    st.caption(escape(histograms_seen(spans, training.run.spec.cadence.histogram)))
    with st.container(horizontal=True):
        for entry in (links.GRADIENTS, links.LOSS_SCALE):
            if spans or entry is links.LOSS_SCALE:
                links.link(entry, run=training.run.id)


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


def step_spans(run: RunInfo) -> list[tuple[int, int]]:
    """First and last step of the frames, of the role that has most."""
    return max((store.frame_spans(run, role) for role in Role), key=len)


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


def show_reports(trainings: Sequence[Training]) -> None:
    """What cannot be seen, and everything else that the run reported."""
    notes = dict.fromkeys(e.text for t in trainings for e in t.of("note"))
    if notes:
        st.subheader("What cannot be seen", anchor=False)
        st.markdown("\n".join(f"- {escape(text)}" for text in notes))
    every = [(t, e) for t in trainings for e in t.events]
    if every:
        with chart.details(f"All {plural(len(every), 'report')} of this training"):
            _events_table(sorted(every, key=lambda pair: -pair[1].step), "reports")


def _events(trainings: Sequence[Training], kind: str) -> list[tuple[Training, Event]]:
    """Events of a kind of all ranks, the newest first."""
    pairs = [(t, e) for t in trainings for e in t.of(kind)]
    return sorted(pairs, key=lambda pair: -pair[1].step)


def _of_rank(training: Training, trainings: Sequence[Training]) -> str:
    return f", rank {training.run.spec.rank}" if len(trainings) > 1 else ""


def _events_table(pairs: Sequence[tuple[Training, Event]], name: str) -> None:
    table = pd.DataFrame(
        {
            "Step": [e.step for _, e in pairs],
            "Rank": [t.run.spec.rank for t, _ in pairs],
            "Kind": [e.kind for _, e in pairs],
            "Name": [e.name for _, e in pairs],
            "Report": [e.text for _, e in pairs],
            "File": [e.path for _, e in pairs],
        }
    )
    chart.table(table, name, key=f"training-{name}")
