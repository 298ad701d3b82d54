"""What this machine reaches, measured: started here, followed, drawn, and set beside the tables."""

from __future__ import annotations

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope.hardware.bench_view import BenchView, bench_view, bytes_words, rate_words
from ampscope.hardware.describe import HardwareReport, uses_cuda
from ampscope.records import Rate, RunInfo, RunSpec
from app import chart, layout, links, permissions, store
from app.figures.alignment import alignment_figure
from app.figures.rates import rates_figure
from app.hardware import hardware_tables
from app.layout import KeyFigure
from app.runs import measurements
from app.text import escape, percent

KIND = "bench"
AUTO = "auto"


def draw(report: HardwareReport, answer: DeltaGenerator) -> None:
    """The section; its sentence goes to ``answer``, at the head of the page."""
    st.subheader("What it reaches", anchor=False)
    _start(report)
    _not_measured(report)
    run = measurements.opened(KIND)
    if run is None:
        if not measurements.of_kind(KIND):
            st.info(
                "**Nothing has been measured here yet.** The measurement multiplies random "
                "matrices in every dtype, copies memory, and tries crooked sizes."
            )
        return
    rates = [r for r in store.results(run) if isinstance(r, Rate)]
    view = bench_view(run, rates, store.samples(run), report)
    with answer:
        if view.sentence and not run.spec.imported:  # it says "here"
            layout.sentence(view.sentence)
    _ceilings(run, rates, view)
    _alignment(run, rates, view)


def _start(report: HardwareReport) -> None:
    if not permissions.offers("measuring the machine"):
        return
    is_busy = any(run.state.is_active for run in measurements.of_kind(KIND))
    with st.container(horizontal=True, vertical_alignment="bottom"):
        device = _device(report)
        whole = st.button(
            "Measure this machine",
            help="Half a minute on a CPU, a minute on a GPU, which is busy meanwhile.",
            disabled=is_busy,
        )
        quick = st.button("Measure quickly", help="Fewer sizes, about 10 s.", disabled=is_busy)
    if whole or quick:
        args = ("quick",) if quick else ()
        measurements.start(RunSpec(workload="", kind=KIND, device=device, args=args))


def _device(report: HardwareReport) -> str:
    """Which GPU, where there are several; torch's numbers, which may differ from NVML's."""
    if len(report.gpus) < 2 or not uses_cuda(report):
        return AUTO
    options = [*(f"cuda:{index}" for index in range(len(report.gpus))), "cpu"]
    return links.select("Device", "bench_device", options, writes_default=False)


def _not_measured(report: HardwareReport) -> None:
    """Devices that are here and that a measurement does not use."""
    others = [f"{other.name} ({other.backend})" for other in report.accelerators]
    if others and not uses_cuda(report):
        named = ", ".join(others)
        st.caption(escape(f"Not measured: {named}. Measurements run on CUDA and on the CPU."))


def _ceilings(run: RunInfo, rates: list[Rate], view: BenchView) -> None:
    layout.key_figures(_key_figures(view))
    for warning in view.warnings:
        st.warning(escape(warning), icon=":material/speed:")
    layout.see(
        "Each line is a dtype: the median rate of a product of random square matrices, with its "
        f"quartiles. Higher is faster. {view.vendor_sentence}"
    )
    chart.show(
        store.drawn(run, "rates", lambda: rates_figure(rates, view.vendor)),
        "rates",
        lambda: hardware_tables.every(rates),
        key="rates",
    )
    with layout.details("Rates, spread and sources as a table"):
        st.dataframe(hardware_tables.shown(view), hide_index=True, height="content")
        st.caption(escape(f"{measurements.made(run)}. {view.vendor_sentence}"))


def _alignment(run: RunInfo, rates: list[Rate], view: BenchView) -> None:
    if not view.costs:
        return
    st.subheader("Crooked sizes", anchor=False)
    layout.see(view.alignment_sentence)
    chart.show(
        store.drawn(run, "alignment", lambda: alignment_figure(rates)),
        "alignment",
        lambda: hardware_tables.every([r for r in rates if r.series.startswith("align")]),
        key="alignment",
    )
    left = [r for r in rates if r.series.startswith("align") and r.timing is None]
    for note in dict.fromkeys(r.note for r in left):
        named = [f"{r.op} {r.dtype} {r.layout}".strip() for r in left if r.note == note]
        st.caption(escape(f"{', '.join(named)}: {note}"))


def _key_figures(view: BenchView) -> list[KeyFigure]:
    wanted = [c for c in view.ceilings if c.dtype in ("fp32", "bf16", "fp16") and c.best]
    figures = [
        KeyFigure(
            f"{found.dtype} products",
            rate_words(found.flops_s),
            _beside(found.share, found.best),
        )
        for found in wanted
    ]
    if view.copy is not None:
        copy = KeyFigure(
            "Copying", bytes_words(view.copy.bytes_s), _beside(view.copy_share, view.copy)
        )
        figures.append(copy)
    return figures


def _beside(share: float | None, rate: Rate | None) -> str:
    of = (
        "The vendor's figure is unknown." if share is None else f"{percent(share)} of the vendor's."
    )
    timing = rate.timing if rate else None
    if timing is None:
        return of
    return f"{of} Median of {timing.repeats}; quartiles {percent(timing.spread)} apart."
