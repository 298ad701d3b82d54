"""Sections of the Training page: how a run stands, what went wrong, its curves, what it said."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from ampscope.analysis.training import Training
from ampscope.records import Event, RunInfo
from ampscope.report.words.training import ALARM_NAMES, answer
from app import chart, layout, sitemap, store
from app.figures.training_curves import training_curves
from app.text import escape, plural
from app.training import training_data, training_words

AT_FIRST = 5  # alarms and capsules that are shown without being asked for
_MISSING = (
    "This file is not on the machine that runs the dashboard: run the command where the training "
    "ran, or copy the file. A run keeps a limited number of capsules."
)


def overview(training: Training) -> None:
    """The sentence and the key figures of a single run."""
    layout.sentence(answer(training))
    layout.key_figures(training_words.key_figures(training))


def alarms(trainings: Sequence[Training]) -> None:
    """The newest alarms; each says what to do."""
    found = _told(trainings, "alarm")
    if not found:
        return
    st.subheader(f"Alarms ({len(found)})", anchor=False)
    for training, event in found[:AT_FIRST]:
        name = ALARM_NAMES.get(event.name, event.name)
        where = escape(f"Step {event.step:,}{_of_rank(training, trainings)}: {name}.")
        st.warning(f"**{where}** {escape(event.text)}")
    if found[AT_FIRST:]:
        with layout.details(plural(len(found) - AT_FIRST, "earlier alarm")):
            _table(found[AT_FIRST:], "alarms")


def capsules(trainings: Sequence[Training]) -> None:
    """What was kept of failing steps, and how to run it again."""
    found = _told(trainings, "capsule")[::-1]  # the first is nearest to the cause
    if not found:
        return
    st.subheader(f"Capsules ({len(found)})", anchor=False)
    layout.see(
        "A capsule keeps a failing step. The command runs it again beside fp32 and names the first "
        "bad op; put your own file and the function that builds your model in it."
    )
    for training, event in found[:AT_FIRST]:
        _capsule(training, event, trainings)
    if found[AT_FIRST:]:
        with layout.details(plural(len(found) - AT_FIRST, "later capsule")):
            for training, event in found[AT_FIRST:]:
                _capsule(training, event, trainings)


def curves(training: Training) -> None:
    """The chart over all steps."""
    rank = f", rank {training.run.spec.rank}" if training.run.spec.world > 1 else ""
    st.subheader(f"Over all steps{rank}", anchor=False)
    layout.see(training_words.chart_seen(training))
    spans = training_data.spans(training.run)
    figure = store.drawn(training.run, "training-curves", lambda: _figure(training, spans))
    chart.show(figure, "training", lambda: steps_table(training), key="training")
    st.caption(escape(_histograms(training.run, spans)))
    with st.container(horizontal=True):
        for entry in (sitemap.GRADIENTS, sitemap.LOSS_SCALE):
            if spans or entry is sitemap.LOSS_SCALE:
                st.page_link(
                    entry.file,
                    label=entry.title,
                    icon=entry.icon,
                    query_params={"run": training.run.id},
                )


def said(trainings: Sequence[Training]) -> None:
    """What cannot be seen, and everything else that the run reported."""
    notes = dict.fromkeys(e.text for t in trainings for e in t.of("note"))
    if notes:
        st.subheader("What cannot be seen", anchor=False)
        st.markdown("\n".join(f"- {escape(text)}" for text in notes))
    every = [(t, e) for t in trainings for e in t.events]
    if every:
        with layout.details(f"All {plural(len(every), 'report')} of this training"):
            _table(sorted(every, key=lambda pair: -pair[1].step), "reports")


def steps_table(training: Training) -> pd.DataFrame:
    """The steps that the chart draws."""
    return pd.DataFrame([dataclasses.asdict(s) for s in training.steps])


def _figure(training: Training, spans: Sequence[tuple[int, int]]) -> go.Figure:
    return training_curves(training.steps, training.loss, training.norm, spans)


def _capsule(training: Training, event: Event, trainings: Sequence[Training]) -> None:
    with st.container(border=True, gap="small"):
        where = escape(f"Step {event.step:,}{_of_rank(training, trainings)}")
        st.markdown(f"**{where}.** {escape(event.text)}")
        for replayed in training.of("replay"):
            if replayed.step == event.step:
                st.markdown(f"**{escape('Run again:')}** {escape(replayed.text)}")
        st.code(training_words.replay_command(event), language="bash", wrap_lines=True)
        if not _is_here(event.path):
            st.caption(_MISSING)


def _is_here(path: str) -> bool:
    """A path from a run may be anything: too long for a file, or no name at all."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _histograms(run: RunInfo, spans: Sequence[tuple[int, int]]) -> str:
    return training_words.histograms_seen(spans, run.spec.cadence.histogram)


def _told(trainings: Sequence[Training], kind: str) -> list[tuple[Training, Event]]:
    """Events of a kind of all ranks, the newest first."""
    pairs = [(t, e) for t in trainings for e in t.of(kind)]
    return sorted(pairs, key=lambda pair: -pair[1].step)


def _of_rank(training: Training, trainings: Sequence[Training]) -> str:
    return f", rank {training.run.spec.rank}" if len(trainings) > 1 else ""


def _table(pairs: Sequence[tuple[Training, Event]], name: str) -> None:
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
    st.dataframe(table, hide_index=True, key=f"training-{name}")
    chart.download(lambda: table, name, key=f"training-{name}")
