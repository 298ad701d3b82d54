"""The pages Compare and Batch size: their forms, and what each shows of a measurement."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.analysis.telemetry import others_bound, spoiled
from ampscope.analysis.training import finite_parts
from ampscope.compare.comparison import (
    BASES,
    BatchSearch,
    LossChange,
    PrecisionResults,
    base_of,
    batches_by_precision,
    by_precision,
    figures,
    loss_difference,
    memory_ratio,
    searches_json,
    sentence,
    speedup,
)
from ampscope.compare.verdict import claims, comparison_json, verdict
from ampscope.errors import AmpscopeError
from ampscope.hardware.describe import uses_cuda
from ampscope.number_words import seconds
from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.records import Machine, RunInfo, RunSpec
from ampscope.report.palette import dtype_color
from app import chart, machine, permissions, states, store
from app.chart import KeyFigure
from app.figures.comparison import memory_bars, memory_words, step_bars, throughput
from app.figures.training import Curve, control_losses
from app.runs import measurements, workload_choice
from app.text import escape, percent, size

# Start a comparison or a batch search: workload, precisions, and the button.


SLOW = (
    "fp16 matmuls have no instruction on most CPUs: a step can take a hundred times as long. It "
    "then makes a few steps only."
)
LIMIT_S = 170.0
BATCH_LIMIT_S = 600.0
DEFAULT_LIMIT_MIB = 512


def comparison_form() -> None:
    """Precisions, seeds and steps."""
    if not permissions.offers("starting a comparison"):
        return
    on_cuda = uses_cuda(machine.report())
    what, how = st.columns(2, gap="large")
    with what:
        choice = workload_choice.pick_workload(RunSpec(workload="gpt", size="small"))
    with how:
        chosen = _precisions(("fp32", "bf16"), on_cuda)
        seeds = st.number_input(
            "Seeds", 1, 20, 3, key="cmp-seeds",
            help="Trainings per precision. With one, it is unknown whether a difference in loss is "
            "more than chance.",
        )  # fmt: skip
        steps = st.number_input("Steps a seed", 6, 1000, 30, key="cmp-steps")
        pressed = st.button("Compare", type="primary", disabled=len(chosen) < 2, key="cmp-start")
    if pressed:
        _start(choice, "compare", chosen, seeds=int(seeds), steps=int(steps), time_limit_s=LIMIT_S)


def batch_form() -> None:
    """Precisions, sizes to try and, on a CPU, the memory that training may take."""
    if not permissions.offers("starting a search"):
        return
    on_cuda = uses_cuda(machine.report())
    what, how = st.columns(2, gap="large")
    with what:
        choice = workload_choice.pick_workload(RunSpec(workload="gpt", size="tiny"))
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
        _start(
            choice, "batch", chosen, memory_limit_mib=int(limit),
            multiple_of=sizes[step or "multiples of 8"], time_limit_s=BATCH_LIMIT_S,
        )  # fmt: skip


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


def _start(
    choice: workload_choice.Choice, kind: str, precisions: list[str], *, seeds: int = 1,
    steps: int = 1, memory_limit_mib: int = 0, multiple_of: int = 1, time_limit_s: float,
) -> None:  # fmt: skip
    try:
        measurements.start(
            RunSpec(
                workload=workload_choice.named(choice),
                kind=kind,
                size=choice.size,
                precision=",".join(precisions),
                steps=steps,
                seeds=seeds,
                policy="native",  # a rehearsal of CUDA's rules says nothing about time
                memory_limit_mib=memory_limit_mib,
                multiple_of=multiple_of,
                time_limit_s=time_limit_s,
            )
        )
    except AmpscopeError as error:
        states.unreadable(str(error))


# A comparison of precisions: the verdict, key figures, time, memory, losses, promises.


DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def show_comparison(run: RunInfo) -> None:
    """Everything about it, as far as it has come."""
    measured = by_precision(store.results(run))
    base = base_of(measured)
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
    if any(m.memory for m in measured):
        chart.see(_memory_seen(measured))
        chart.show(
            memory_bars(measured), "memory", lambda: _memory_table(measured), key="cmp-memory"
        )
    chart.see(_losses_seen(base, measured))
    chart.show(
        control_losses(_curves(measured), "step"),
        "losses",
        lambda: _losses(measured),
        key="cmp-loss",
    )
    st.subheader("What articles promise", anchor=False)
    for other in measured:
        if other.precision not in BASES and other.times is not None:
            _promises(base, other, run.machine)
    measurements.telemetry(run)
    _details(run, measured)


def _disturbed(run: RunInfo) -> tuple[str, ...]:
    return spoiled(store.samples(run), others_bound(run.spec))


def _figures(
    base: PrecisionResults, measured: tuple[PrecisionResults, ...], name: str
) -> list[KeyFigure]:
    best = next((m for m in measured if m.precision == name), None)
    if best is None or best.times is None or base.times is None:
        return [KeyFigure(f"A step in {base.precision}", _median(base))]
    ratio, memory = speedup(base.times, best.times), memory_ratio(base, best)
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
            str(loss_difference(base, best).change),
            "Whether the mean loss of the last third differs by more than seeds do.",
        ),
    ]


def _median(m: PrecisionResults) -> str:
    return seconds(m.times.step.median_s) if m.times else "not measured"


def _time_seen(base: PrecisionResults, measured: tuple[PrecisionResults, ...]) -> str:
    parts = [
        f"{m.precision} {speedup(base.times, m.times).value:.2f}× as fast"
        for m in measured
        if m is not base and m.times and base.times
    ]
    return (
        f"Against {base.precision}: {', '.join(parts)}. The bars are the phases of the default "
        "step; the mark is the median of the whole, with its quartiles."
    )


def _memory_seen(measured: tuple[PrecisionResults, ...]) -> str:
    parts = [f"{m.precision}: {memory_words(m.memory)}" for m in measured if m.memory]
    return f"What lives when a step needs most. {'; '.join(parts)}."


def _losses_seen(base: PrecisionResults, measured: tuple[PrecisionResults, ...]) -> str:
    words = []
    for m in measured:
        if m is base:
            continue
        found = loss_difference(base, m)
        if found.change is LossChange.UNKNOWN:
            words.append(f"{m.precision}: unknown, {found.why}")
        elif found.change is LossChange.DIVERGED:
            words.append(f"{m.precision}: not finite from step {found.first_nonfinite}")
        else:
            words.append(
                f"{m.precision}: off by {found.gap:+.3g} where seeds differ by {found.noise:.3g}"
            )
    return f"Loss of the last third against {base.precision}. {'; '.join(words)}."


def _curves(measured: tuple[PrecisionResults, ...]) -> list[Curve]:
    return [
        Curve(
            f"{m.precision}, seed {curve.seed}",
            finite_parts(range(len(curve.losses)), curve.losses),
            dtype_color(m.precision),
            DASHES[place % len(DASHES)],
        )
        for m in measured
        for place, curve in enumerate(m.curves)
    ]


def _promises(base: PrecisionResults, other: PrecisionResults, machine: Machine | None) -> None:
    rows = [
        {
            "promise": escape(c.claim),
            f"{escape(other.precision)}, measured here": escape(c.measured),
            "why": escape(c.why),
        }
        for c in claims(base, other, machine)
    ]
    st.table(pd.DataFrame(rows).set_index("promise"), border="horizontal")


def _details(run: RunInfo, measured: tuple[PrecisionResults, ...]) -> None:
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


def _table(measured: tuple[PrecisionResults, ...], price: float) -> pd.DataFrame:
    rows = []
    for label, cell in figures(base_of(measured), price):
        cells = {m.precision: cell(m) for m in measured}
        if any(cells.values()):
            rows.append({"": label, **{k: v or "not measured" for k, v in cells.items()}})
    return pd.DataFrame(rows)


def _memory_table(measured: tuple[PrecisionResults, ...]) -> pd.DataFrame:
    splits = [s for m in measured for s in (m.memory, m.other_memory) if s is not None]
    return pd.DataFrame(splits)


def _losses(measured: tuple[PrecisionResults, ...]) -> pd.DataFrame:
    rows = [
        (m.precision, curve.seed, step, loss, step in curve.skipped)
        for m in measured
        for curve in m.curves
        for step, loss in enumerate(curve.losses)
    ]
    return pd.DataFrame(rows, columns=["precision", "seed", "step", "loss", "skipped"])


# A batch search: the answer, key figures, throughput against the batch size, every try.


def show_batches(run: RunInfo) -> None:
    """Everything about it, as far as it has come."""
    searches = batches_by_precision(store.results(run))
    if not searches:
        states.nothing_recorded("The first try is being made.", "")
        return
    chart.sentence(sentence(searches))
    chart.key_figures([_figure(search) for search in searches[: chart.MAX_KEY_FIGURES]])
    if any(t.step for s in searches for t in s.trials):
        chart.see(_seen(searches))
        chart.show(throughput(searches), "throughput", lambda: _frame(searches), key="bs-chart")
    measurements.telemetry(run)
    with chart.details("Every try"):
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
    predicted = "Not predicted: this needs two trials that fit, the larger one with more memory."
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
                "time per step": "" if t.step is None else seconds(t.step.median_s),
                "samples per second": None if t.samples_s is None else round(t.samples_s, 1),
                "how it ended": t.how_it_ended,
            }
            for s in searches
            for t in s.trials
        ]
    )
