"""A batch search: the answer, key figures, throughput against the batch size, every try."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.compare.batches import BatchSearch, by_precision, searches_json, sentence
from ampscope.compare.figures import seconds
from ampscope.records import RunInfo
from app import chart, layout, states, store
from app.figures.throughput import throughput
from app.layout import KeyFigure
from app.runs import measurements
from app.text import size


def show(run: RunInfo) -> None:
    """Everything about it, as far as it has come."""
    searches = by_precision(store.results(run))
    if not searches:
        states.nothing_recorded("The first try is being made.", "")
        return
    layout.sentence(sentence(searches))
    layout.key_figures([_figure(search) for search in searches[: layout.MAX_KEY_FIGURES]])
    if any(t.step for s in searches for t in s.tries):
        layout.see(_seen(searches))
        chart.show(throughput(searches), "throughput", lambda: _frame(searches), key="bs-chart")
    measurements.telemetry(run)
    with layout.details("Every try"):
        st.dataframe(_frame(searches), hide_index=True, height="content")
    chart.file(
        "Everything as JSON",
        lambda: searches_json(run, searches).encode(),
        f"batch-size-{run.id}.json",
        "application/json",
        key="bs-json",
    )


def _figure(search: BatchSearch) -> KeyFigure:
    found, said = search.largest, search.prediction
    value = "searching" if found is None else f"{found.samples:,}"
    predicted = "Not predicted: that takes two tries that fit, of which the larger needs more."
    if said is not None:
        predicted = (
            f"Predicted {said.largest:,}, from {size(said.fixed_bytes)} and "
            f"{said.bytes_per_sample / 1024:,.1f} KiB a sample under {size(said.limit_bytes)}."
        )
    return KeyFigure(f"Largest batch in {search.precision}", value, predicted)


def _seen(searches: tuple[BatchSearch, ...]) -> str:
    words = [
        f"{s.precision} reaches nine tenths of its best throughput with {s.knee.samples:,} samples"
        for s in searches
        if s.knee is not None
    ]
    return f"{'; '.join(words)}. Beyond that a larger batch buys memory pressure, not speed."


def _frame(searches: tuple[BatchSearch, ...]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "precision": s.precision,
                "samples": t.samples,
                "fits": "yes" if t.fits else "no",
                "peak": "" if t.peak_bytes is None else size(t.device_peak or t.peak_bytes),
                "time a step": "" if t.step is None else seconds(t.step.median_s),
                "samples a second": None if t.samples_s is None else round(t.samples_s, 1),
                "how it ended": t.how_it_ended,
            }
            for s in searches
            for t in s.tries
        ]
    )
