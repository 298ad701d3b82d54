"""A comparison of precisions: the verdict, key figures, time, memory, losses, promises."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.analysis.loss_scale import finite_parts
from ampscope.analysis.telemetry import others_bound, spoiled
from ampscope.compare.claims import claims
from ampscope.compare.export import comparison_json
from ampscope.compare.figures import figures, seconds
from ampscope.compare.losses import LossChange, loss_difference
from ampscope.compare.verdict import verdict
from ampscope.compare.views import (
    BASES,
    Measured,
    base_of,
    by_precision,
    memory_ratio,
    speedup,
)
from ampscope.records import Machine, RunInfo
from app import chart, layout, states, store
from app.figures.compare_bars import memory_bars, memory_words, step_bars
from app.figures.control_losses import Curve, control_losses
from app.layout import KeyFigure
from app.palette import dtype_color
from app.runs import measurements
from app.text import escape, percent

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def show(run: RunInfo) -> None:
    """Everything about it, as far as it has come."""
    measured = by_precision(store.results(run))
    base = base_of(measured)
    if base is None or base.times is None:
        states.nothing_recorded("The first steps are being made.", "Their times come next.")
        return
    judged = verdict(measured)
    layout.sentence(judged.sentence)
    for line in _disturbed(run):
        st.warning(escape(f"This comparison was disturbed. {line}"))
    layout.key_figures(_figures(base, measured, judged.precision))
    layout.see(_time_seen(base, measured))
    chart.show(step_bars(measured), "step-times", lambda: _table(measured, 0.0), key="cmp-time")
    if any(m.memory for m in measured):
        layout.see(_memory_seen(measured))
        chart.show(
            memory_bars(measured), "memory", lambda: _memory_table(measured), key="cmp-memory"
        )
    layout.see(_losses_seen(base, measured))
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


def _figures(base: Measured, measured: tuple[Measured, ...], name: str) -> list[KeyFigure]:
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


def _median(m: Measured) -> str:
    return seconds(m.times.step.median_s) if m.times else "not measured"


def _time_seen(base: Measured, measured: tuple[Measured, ...]) -> str:
    parts = [
        f"{m.precision} {speedup(base.times, m.times).value:.2f}× as fast"
        for m in measured
        if m is not base and m.times and base.times
    ]
    return (
        f"Against {base.precision}: {', '.join(parts)}. The bars are the phases of the default "
        "step; the mark is the median of the whole, with its quartiles."
    )


def _memory_seen(measured: tuple[Measured, ...]) -> str:
    parts = [f"{m.precision}: {memory_words(m.memory)}" for m in measured if m.memory]
    return f"What lives when a step needs most. {'; '.join(parts)}."


def _losses_seen(base: Measured, measured: tuple[Measured, ...]) -> str:
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


def _curves(measured: tuple[Measured, ...]) -> list[Curve]:
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


def _promises(base: Measured, other: Measured, machine: Machine | None) -> None:
    rows = [
        {
            "promise": escape(c.claim),
            f"{escape(other.precision)}, measured here": escape(c.measured),
            "why": escape(c.why),
        }
        for c in claims(base, other, machine)
    ]
    st.table(pd.DataFrame(rows).set_index("promise"), border="horizontal")


def _details(run: RunInfo, measured: tuple[Measured, ...]) -> None:
    with layout.details("All figures, and what a million samples cost"):
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


def _table(measured: tuple[Measured, ...], price: float) -> pd.DataFrame:
    rows = []
    for label, cell in figures(base_of(measured), price):
        cells = {m.precision: cell(m) for m in measured}
        if any(cells.values()):
            rows.append({"": label, **{k: v or "not measured" for k, v in cells.items()}})
    return pd.DataFrame(rows)


def _memory_table(measured: tuple[Measured, ...]) -> pd.DataFrame:
    splits = [s for m in measured for s in (m.memory, m.other_memory) if s is not None]
    return pd.DataFrame(splits)


def _losses(measured: tuple[Measured, ...]) -> pd.DataFrame:
    rows = [
        (m.precision, curve.seed, step, loss, step in curve.skipped)
        for m in measured
        for curve in m.curves
        for step, loss in enumerate(curve.losses)
    ]
    return pd.DataFrame(rows, columns=["precision", "seed", "step", "loss", "skipped"])
