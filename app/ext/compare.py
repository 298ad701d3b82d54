"""The pages Compare (verdict, time, memory, losses and promises of precisions) and Batch size
(throughput against the batch size, every trial): the form of each, and what it shows of a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from ampscope.analysis.telemetry import others_bound, spoiled
from ampscope.analysis.training import finite_parts
from ampscope.ext.compare import batches, comparison
from ampscope.ext.compare.verdict import claims, comparison_json, verdict
from ampscope.number_words import seconds
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.records import Machine, MemorySplit, RunInfo
from ampscope.story.palette import dtype_color
from app import chart, states, store
from app.chart import KeyFigure
from app.ext.compare_figures import step_bars, throughput
from app.figures.memory import memory_bars, memory_words
from app.figures.training import DrawnCurve, control_losses
from app.runs import measurements
from app.text import escape, percent, size

SLOW = (
    "fp16 matmuls have no instruction on most CPUs: a step can take a hundred times as long. It "
    "then makes a few steps only."
)
LIMIT_S = 170.0
BATCH_LIMIT_S = 600.0
DEFAULT_LIMIT_MIB = 512
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def comparison_form() -> None:
    """Precisions, seeds and steps."""
    found = measurements.form("starting a comparison", "small")
    if found is None:
        return
    choice, how, on_cuda = found
    with how:
        chosen = _precisions(("fp32", "bf16"), on_cuda)
        seeds = st.number_input(
            "Seeds", 1, 20, 3, key="cmp-seeds",
            help="Trainings per precision. With one, it is unknown whether a difference in loss is "
            "more than chance.",
        )  # fmt: skip
        steps = st.number_input("Steps per seed", 6, 1000, 30, key="cmp-steps")
        pressed = st.button("Compare", type="primary", disabled=len(chosen) < 2, key="cmp-start")
    if pressed:
        measurements.start_with(
            choice,
            "compare",
            precision=",".join(chosen),
            seeds=int(seeds),
            steps=int(steps),
            time_limit_s=LIMIT_S,
        )


def _precisions(default: tuple[str, ...], on_cuda: bool) -> list[str]:
    names = [name for name, mode in PRECISIONS.items() if on_cuda or not mode.tf32]
    chosen = st.multiselect(
        "Precisions",
        names,
        default=[*default, *(["fp16"] if on_cuda else [])],
        format_func=lambda name: f"{name}: {PRECISIONS[name].summary}",
        key="cmp-precisions",
    )
    if not on_cuda and any("fp16" in name for name in chosen):
        st.caption(escape(SLOW))
    return chosen


def show_comparison(run: RunInfo) -> None:
    """Everything about it, as far as it has come."""
    measured = comparison.by_precision(store.results(run))
    base = comparison.base_of(measured)
    if base is None or base.times is None:
        states.nothing_recorded("The first steps are being made.", "Their times come next.")
        return
    judged = verdict(measured)
    chart.sentence(judged.sentence)
    for line in _disturbed(run):
        st.warning(escape(f"This comparison was disturbed. {line}"))
    chart.key_figures(_figures(base, measured, judged.precision))
    chart.see(_time_seen(base, measured))
    chart.show(step_bars(measured), "step-times", lambda: _table(measured, 0.0), key="cmp-time")
    splits = [m.memory for m in measured if m.memory is not None]
    if splits:
        chart.see(_memory_seen(splits))
        chart.show(memory_bars(splits), "memory", lambda: _memory_table(measured), key="cmp-memory")
    chart.see(_losses_seen(base, measured))
    chart.show(
        control_losses(_curves(measured), "step"),
        "losses",
        lambda: _losses(measured),
        key="cmp-loss",
    )
    st.subheader("What articles promise", anchor=False)
    for other in measured:
        if other.precision not in comparison.BASES and other.times is not None:
            _promises(base, other, run.machine)
    measurements.telemetry(run)
    _details(run, measured)


def _disturbed(run: RunInfo) -> tuple[str, ...]:
    return spoiled(store.samples(run), others_bound(run.spec))


def _figures(
    base: comparison.PrecisionResults, measured: tuple[comparison.PrecisionResults, ...], name: str
) -> list[KeyFigure]:
    best = next((m for m in measured if m.precision == name), None)
    if best is None or best.times is None or base.times is None:
        return [KeyFigure(f"A step in {base.precision}", _median(base))]
    ratio, memory = comparison.speedup(base.times, best.times), comparison.memory_ratio(base, best)
    return [
        KeyFigure(
            f"{name} against {base.precision}",
            f"{ratio.value:.2f}×",
            f"How many times as fast a step is; {ratio.low:.2f} to {ratio.high:.2f} by the "
            "quartiles.",
        ),
        KeyFigure(f"A step in {name}", _median(best), f"{base.precision}: {_median(base)}."),
        KeyFigure(
            "Peak memory",
            "not measured" if memory is None else percent(memory),
            f"Of what {base.precision} needs, for tensors.",
        ),
        KeyFigure(
            "Loss",
            str(comparison.loss_difference(base, best).change),
            "Whether the mean loss of the last third differs by more than seeds do.",
        ),
    ]


def _median(m: comparison.PrecisionResults) -> str:
    return seconds(m.times.step.median_s) if m.times else "not measured"


def _time_seen(
    base: comparison.PrecisionResults, measured: tuple[comparison.PrecisionResults, ...]
) -> str:
    parts = [
        f"{m.precision} {comparison.speedup(base.times, m.times).value:.2f}× as fast"
        for m in measured
        if m is not base and m.times and base.times
    ]
    return (
        f"Against {base.precision}: {', '.join(parts)}. The bars are the phases of the default "
        "step; the mark is the median of the whole, with its quartiles."
    )


def _memory_seen(splits: Sequence[MemorySplit]) -> str:
    parts = [f"{split.precision}: {memory_words(split)}" for split in splits]
    return f"What lives when a step needs most. {'; '.join(parts)}."


def _losses_seen(
    base: comparison.PrecisionResults, measured: tuple[comparison.PrecisionResults, ...]
) -> str:
    words = []
    for m in measured:
        if m is base:
            continue
        found = comparison.loss_difference(base, m)
        if found.change is comparison.LossChange.UNKNOWN:
            words.append(f"{m.precision}: unknown, {found.why}")
        elif found.change is comparison.LossChange.DIVERGED:
            words.append(f"{m.precision}: first not finite at step {found.first_nonfinite}")
        else:
            words.append(
                f"{m.precision}: off by {found.gap:+.3g} where seeds differ by {found.noise:.3g}"
            )
    return f"Loss of the last third against {base.precision}. {'; '.join(words)}."


def _curves(measured: tuple[comparison.PrecisionResults, ...]) -> list[DrawnCurve]:
    return [
        DrawnCurve(
            f"{m.precision}, seed {curve.seed}",
            finite_parts(range(len(curve.losses)), curve.losses),
            dtype_color(m.precision),
            DASHES[place % len(DASHES)],
        )
        for m in measured
        for place, curve in enumerate(m.curves)
    ]


def _promises(
    base: comparison.PrecisionResults, other: comparison.PrecisionResults, machine: Machine | None
) -> None:
    rows = [
        {
            "promise": escape(c.claim),
            f"{escape(other.precision)}, measured here": escape(c.measured),
            "why": escape(c.why),
        }
        for c in claims(base, other, machine)
    ]
    st.table(pd.DataFrame(rows).set_index("promise"), border="horizontal")


def _details(run: RunInfo, measured: tuple[comparison.PrecisionResults, ...]) -> None:
    with chart.details("All figures, and what a million samples cost"):
        price = st.number_input(
            "Price of this machine an hour", 0.0, 1e6, 0.0, key="cmp-price",
            help="In any currency; the last row then says what a million samples cost.",
        )  # fmt: skip
        st.dataframe(_table(measured, price), hide_index=True, height="content")
    chart.file(
        "Everything as JSON",
        lambda: comparison_json(run, store.results(run), _disturbed(run)).encode(),
        f"comparison-{run.id}.json",
        "application/json",
        key="cmp-json",
    )


def _table(measured: tuple[comparison.PrecisionResults, ...], price: float) -> pd.DataFrame:
    rows = [
        (label, *(text or "not measured" for text in cells))
        for label, cells in comparison.figure_rows(measured, price)
    ]
    return pd.DataFrame(rows, columns=["", *(m.precision for m in measured)])


def _memory_table(measured: tuple[comparison.PrecisionResults, ...]) -> pd.DataFrame:
    splits = [s for m in measured for s in (m.memory, m.other_memory) if s is not None]
    return pd.DataFrame(splits)


def _losses(measured: tuple[comparison.PrecisionResults, ...]) -> pd.DataFrame:
    rows = [
        (m.precision, curve.seed, step, loss, step in curve.skipped)
        for m in measured
        for curve in m.curves
        for step, loss in enumerate(curve.losses)
    ]
    return pd.DataFrame(rows, columns=["precision", "seed", "step", "loss", "skipped"])


def batch_form() -> None:
    """Precisions, sizes to try and, on a CPU, the memory that training may take."""
    found = measurements.form("starting a search", "tiny")
    if found is None:
        return
    choice, how, on_cuda = found
    with how:
        chosen = _precisions(("fp32", "bf16"), on_cuda)
        limit = 0
        if not on_cuda:
            limit = st.number_input(
                "Memory for training (MiB)", 16, 1_000_000, DEFAULT_LIMIT_MIB, key="bs-limit",
                help="Above what Python and torch hold themselves. On CUDA the device decides.",
            )  # fmt: skip
        sizes = {"multiples of 8": 8, "every size": 1, "powers of two": 0}
        step = st.segmented_control("Sizes to try", list(sizes), default="multiples of 8")
        pressed = st.button("Search", type="primary", disabled=not chosen, key="bs-start")
    if pressed:
        measurements.start_with(
            choice,
            "batch",
            precision=",".join(chosen),
            memory_limit_mib=int(limit),
            multiple_of=sizes[step or "multiples of 8"],
            steps=1,
            time_limit_s=BATCH_LIMIT_S,
        )


def show_batches(run: RunInfo) -> None:
    """Everything about it, as far as it has come."""
    searches = batches.batches_by_precision(store.results(run))
    if not searches:
        states.nothing_recorded("The first trial is being made.", "")
        return
    chart.sentence(batches.sentence(searches))
    chart.key_figures([_figure(search) for search in searches[: chart.MAX_KEY_FIGURES]])
    if any(t.step for s in searches for t in s.trials):
        chart.see(_seen(searches))
        chart.show(throughput(searches), "throughput", lambda: _frame(searches), key="bs-chart")
    measurements.telemetry(run)
    with chart.details("Every trial"):
        st.dataframe(_frame(searches), hide_index=True, height="content")
    chart.file(
        "Everything as JSON",
        lambda: batches.searches_json(run, searches).encode(),
        f"batch-size-{run.id}.json",
        "application/json",
        key="bs-json",
    )


def _figure(search: batches.BatchSearch) -> KeyFigure:
    found, said = search.largest, search.prediction
    value = "searching" if found is None else f"{found.samples:,}"
    predicted = "Not predicted: this needs two trials that fit, the larger one with more memory."
    if said is not None:
        predicted = (
            f"Predicted {said.largest:,}, from {size(said.fixed_bytes)} and "
            f"{said.bytes_per_sample / 1024:,.1f} KiB per sample under {size(said.limit_bytes)}."
        )
    return KeyFigure(f"Largest batch in {search.precision}", value, predicted)


def _seen(searches: tuple[batches.BatchSearch, ...]) -> str:
    words = [
        f"{s.precision} reaches nine tenths of its best throughput with {s.knee.samples:,} samples"
        if s.levels_off
        else f"{s.precision} is fastest with {s.knee.samples:,} samples, the most that were timed"
        for s in searches
        if s.knee is not None
    ]
    level = any(s.levels_off for s in searches)
    more = " Beyond nine tenths a larger batch buys memory pressure, not speed." if level else ""
    return f"{'; '.join(words)}.{more}"


def _frame(searches: tuple[batches.BatchSearch, ...]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "precision": s.precision,
                "samples": t.samples,
                "fits": "yes" if t.fits else "no",
                "peak": "" if t.peak_bytes is None else size(t.device_peak or t.peak_bytes),
                "time per step": "" if t.step is None else seconds(t.step.median_s),
                "samples per second": None if t.samples_s is None else round(t.samples_s, 1),
                "how it ended": t.how_it_ended,
            }
            for s in searches
            for t in s.trials
        ]
    )
