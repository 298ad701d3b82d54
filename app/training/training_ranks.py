"""The ranks of one training side by side: the sentence, a row each, all losses in one chart."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from ampscope.analysis.ranks import FirstNonFinite, first_nonfinite
from ampscope.analysis.training import Training
from ampscope.records import Event, RunInfo
from app import chart, layout, store
from app.figures.control_losses import Curve, control_losses
from app.palette import MEASURE, OTHER_DTYPE
from app.text import number, power_of_two
from app.training import training_data, training_words

MOST_CURVES = 16  # more cannot be told apart; the table has every rank
DASHES = ("solid", "dash", "dot", "dashdot")
TABLE_PX = 420


def read(ranks: Sequence[RunInfo]) -> list[Training]:
    """Each rank, in so few points that all together stay quick."""
    return [training_data.read(run, len(ranks)) for run in ranks]


def show(trainings: Sequence[Training]) -> None:
    """Sentence, key figures, table and losses."""
    reported = {t.run.spec.rank: t.events for t in trainings}
    first = first_nonfinite(reported)
    layout.sentence(training_words.answer_of_ranks(trainings, first))
    furthest = max(trainings, key=lambda t: t.totals.last_step or -1)
    layout.key_figures(training_words.key_figures(furthest))
    st.caption(f"Loss, skips and time of a step are those of rank {furthest.run.spec.rank}.")
    st.subheader("Ranks side by side", anchor=False)
    layout.see(training_words.ranks_seen(trainings))
    table = ranks_table(trainings, reported)
    height = min(TABLE_PX, 38 + 35 * len(trainings))
    st.dataframe(table, hide_index=True, key="training-ranks", height=height)
    chart.download(lambda: table, "ranks", key="training-ranks")
    _losses(trainings, first)


def ranks_table(trainings: Sequence[Training], reported: dict[int, list[Event]]) -> pd.DataFrame:
    """One row a rank."""
    firsts = {rank: _first(events) for rank, events in reported.items()}
    return pd.DataFrame(
        {
            "Rank": [t.run.spec.rank for t in trainings],
            "State": [str(t.run.state) for t in trainings],
            "Last step": [t.totals.last_step for t in trainings],
            "Last loss": [number(t.last.loss) if t.last else "none yet" for t in trainings],
            "Loss scale": [_scale(t) for t in trainings],
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


def _scale(training: Training) -> str:
    scale = training.totals.last_scale
    return "none" if scale is None else power_of_two(scale)


def _losses(trainings: Sequence[Training], first: FirstNonFinite | None) -> None:
    """All losses; those that went bad first stand out and are never left out."""
    culprits = set(first.ranks) if first is not None else set()
    ordered = sorted(trainings, key=lambda t: t.run.spec.rank not in culprits)
    drawn = [t for t in ordered if any(s.loss is not None for s in t.steps)][:MOST_CURVES]
    if not drawn:
        return
    drawn.sort(key=lambda t: t.run.spec.rank)
    layout.see(_losses_seen(drawn, trainings, culprits))
    curves = [
        Curve(f"rank {t.run.spec.rank}", t.loss, _color(t, culprits), DASHES[place % len(DASHES)])
        for place, t in enumerate(drawn)
    ]
    versions = tuple(store.version(t.run) for t in trainings)
    figure = store.drawn(
        trainings[0].run, f"ranks-loss{versions}", lambda: control_losses(curves, x_title="step")
    )
    chart.show(figure, "ranks-loss", lambda: _table(drawn), key="ranks-loss")


def _losses_seen(drawn: Sequence[Training], every: Sequence[Training], culprits: set[int]) -> str:
    text = "The loss of each rank, of its own batches."
    if len(drawn) < len(every):
        text = f"The loss of {len(drawn)} of {len(every)} ranks, of their own batches."
    if culprits and len(culprits) < len(drawn):
        named = ", ".join(map(str, sorted(culprits)))
        text += f" In blue: rank {named}, which went non-finite first; the others are grey."
    return text


def _color(training: Training, culprits: set[int]) -> str:
    return MEASURE if not culprits or training.run.spec.rank in culprits else OTHER_DTYPE


def _table(drawn: Sequence[Training]) -> pd.DataFrame:
    rows = [(t.run.spec.rank, s.step, s.loss, s.scale, s.skipped) for t in drawn for s in t.steps]
    return pd.DataFrame(rows, columns=["rank", "step", "loss", "loss_scale", "skipped"])
