"""The page Hardware: what the machine reaches, measured; what it reads now and read in the last two
minutes; its software, and the table of Tensor Cores by compute capability.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope.analysis.bench import BenchView, bench_view
from ampscope.analysis.ceilings import LABELS
from ampscope.analysis.telemetry import by_device
from ampscope.hardware.capability import CAPABILITIES, DTYPE_LABELS, CapabilityRow
from ampscope.hardware.cpu import CpuReading
from ampscope.hardware.describe import HardwareReport, report_json, sentence, uses_cuda
from ampscope.hardware.gpu import GpuReading
from ampscope.number_words import bytes_words, rate_words
from ampscope.records import Rate, RunInfo, RunSpec, Sample
from ampscope.telemetry.cpu import CpuReader
from ampscope.telemetry.gpu import GpuReader
from ampscope.telemetry.values import DeviceLost, DeviceReader
from app import chart, links, permissions, store, telemetry
from app.chart import KeyFigure, key_figures
from app.figures.hardware import alignment_figure, rates_figure
from app.figures.telemetry import telemetry_figure
from app.runs import measurements
from app.text import code, escape, percent, size

SHOWN_DTYPES = ("fp16", "bf16", "tf32", "e4m3", "e5m2", "e2m1", "fp64", "int8", "int4")
GTX_16 = (
    "The GTX 16 series (TU116, TU117) also reports 7.5 and has no Tensor Cores; "
    "before 7.0 no GPU has any."
)
KIND = "bench"
AUTO = "auto"
UNKNOWN = "unknown"
KEPT_S = 120.0
EVERY_S = telemetry.READ_EVERY_S  # readings and curves
TOO_LONG_S = 10.0  # after such a pause a reading would speak for time that was not watched


def draw_sentence(report: HardwareReport) -> None:
    """What AMP can and cannot give here; the first sentence large."""
    st.markdown(escape(sentence(report)))


def draw_bench(report: HardwareReport, answer: DeltaGenerator) -> None:
    """The section; its sentence goes to ``answer``, at the head of the page."""
    st.subheader("What it reaches", anchor=False)
    _start(report)
    _not_measured(report)
    run = measurements.open_measurement(KIND)
    if run is None:
        if not measurements.of_kind(KIND):
            st.info(
                "**Nothing has been measured here yet.** The measurement multiplies random "
                "matrices in every dtype, memory copies, and misaligned sizes."
            )
        return
    rates = [r for r in store.results(run) if isinstance(r, Rate)]
    view = bench_view(run, rates, store.samples(run), report)
    with answer:
        if view.sentence and not run.spec.imported:  # it says "here"
            chart.sentence(view.sentence)
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
    chart.key_figures(_key_figures(view))
    for warning in view.warnings:
        st.warning(escape(warning), icon=":material/speed:")
    chart.see(
        "Each line is a dtype: the median rate of a matmul of random square matrices, with its "
        f"quartiles. Higher is faster. {view.vendor_sentence}"
    )
    chart.show(
        store.drawn(run, "rates", lambda: rates_figure(rates, view.vendor)),
        "rates",
        lambda: every(rates),
        key="rates",
    )
    with chart.details("Rates, spread and sources as a table"):
        st.dataframe(shown(view), hide_index=True, height="content")
        st.caption(escape(f"{measurements.made_where(run)}. {view.vendor_sentence}"))


def _key_figures(view: BenchView) -> list[KeyFigure]:
    wanted = [c for c in view.ceilings if c.dtype in ("fp32", "bf16", "fp16") and c.best]
    figures = [
        KeyFigure(
            f"{found.dtype} matmuls",
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


def shown(view: BenchView) -> pd.DataFrame:
    """One row per dtype, and one for copies; the vendor's source is a sentence below it."""
    rows = [
        {
            "": LABELS[found.dtype],
            "reached": rate_words(found.flops_s),
            **_made(found.best),
            "size": f"{found.best.shape[0]:,}" if found.best else "",
            "vendor's figure": _figure(found.vendor_flops_s),
            "share of it": "" if found.share is None else percent(found.share),
            "note": found.reason or found.note,
        }
        for found in view.ceilings
    ]
    copy, vendor = view.copy, view.vendor
    if copy is not None:
        rows.append(
            {
                "": "copy",
                "reached": bytes_words(copy.bytes_s),
                **_made(copy),
                "size": f"{copy.moved_bytes // 2**21:,} MiB",
                "vendor's figure": bytes_words(vendor.bytes_s) if vendor else UNKNOWN,
                "share of it": "" if view.copy_share is None else percent(view.copy_share),
                "note": "Read and written bytes together.",
            }
        )
    return pd.DataFrame(rows)


def _figure(flops_s: float | None) -> str:
    return UNKNOWN if flops_s is None else rate_words(flops_s)


def _made(rate: Rate | None) -> dict[str, str]:
    if rate is None or rate.timing is None:
        return {"quartiles apart": "", "times": "", "measured": ""}
    return {
        "quartiles apart": percent(rate.timing.spread),
        "times": str(rate.timing.repeats),
        "measured": time.strftime("%Y-%m-%d %H:%M", time.localtime(rate.measured_at)),
    }


def every(rates: Sequence[Rate]) -> pd.DataFrame:
    """One row per rate, in plain numbers."""
    return pd.DataFrame(
        {
            "series": r.series,
            "op": r.op,
            "dtype": r.dtype,
            "layout": r.layout,
            "shape": " x ".join(map(str, r.shape)),
            "flops_per_s": r.flops_s,
            "bytes_per_s": r.bytes_s,
            "median_s": r.timing.median_s if r.timing else None,
            "first_quartile_s": r.timing.low_s if r.timing else None,
            "third_quartile_s": r.timing.high_s if r.timing else None,
            "repeats": r.timing.repeats if r.timing else 0,
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(r.measured_at)),
            "note": r.note,
        }
        for r in rates
    )


def _alignment(run: RunInfo, rates: list[Rate], view: BenchView) -> None:
    if not view.costs:
        return
    st.subheader("Misaligned sizes", anchor=False)
    chart.see(view.alignment_sentence)
    chart.show(
        store.drawn(run, "alignment", lambda: alignment_figure(rates)),
        "alignment",
        lambda: every([r for r in rates if r.series.startswith("align")]),
        key="alignment",
        is_wide=True,
    )
    left = [r for r in rates if r.series.startswith("align") and r.timing is None]
    for note in dict.fromkeys(r.note for r in left):
        named = [f"{r.op} {r.dtype} {r.layout}".strip() for r in left if r.note == note]
        st.caption(escape(f"{', '.join(named)}: {note}"))


@st.fragment(run_every=EVERY_S)
def draw_readings() -> None:
    """Every GPU as NVML reads it, then the CPU."""
    report = telemetry.machine_report()
    for gpu in report.gpus:
        _gpu(gpu)
    _cpu(report.cpu)


def _gpu(gpu: GpuReading) -> None:
    name = gpu.name or "NVIDIA GPU"
    st.markdown(f"**{escape(f'GPU {gpu.index}: {name}')}**")
    if gpu.problem:
        st.warning(escape(gpu.problem))
        return
    key_figures(
        [
            KeyFigure("Memory used", _of(gpu.memory_used_bytes, gpu.memory_total_bytes)),
            KeyFigure(
                "Busy",
                _unit(gpu.gpu_busy_percent, "%"),
                "Share of the last sample period in which a kernel ran.",
            ),
            KeyFigure(
                "Power",
                _unit(gpu.power_w, "W"),
                f"Limit {_unit(gpu.power_limit_w, 'W')}. {_unit(gpu.temperature_c, '°C')}.",
            ),
            KeyFigure(
                "SM clock",
                _unit(gpu.sm_clock_mhz, "MHz"),
                f"Maximum {_unit(gpu.sm_clock_max_mhz, 'MHz')}. "
                f"Memory {_unit(gpu.memory_clock_mhz, 'MHz')}.",
            ),
        ]
    )
    if gpu.throttled_by:
        st.caption(escape(f"Clocks are held down by: {', '.join(gpu.throttled_by)}."))


def _cpu(cpu: CpuReading) -> None:
    st.markdown(f"**{escape(cpu.model or cpu.architecture)}**")
    used = cpu.memory_total_bytes - cpu.memory_available_bytes
    limit = cpu.memory_limit_bytes
    bound = f"This container may use {size(limit)}." if limit else ""
    cores = str(cpu.usable_cores or cpu.logical_cores or "unknown")
    load = "unknown" if cpu.load_1min is None else f"{cpu.load_1min:.2f}"
    key_figures(
        [
            KeyFigure("Cores for probes", cores, f"{cpu.logical_cores} logical in all."),
            KeyFigure("Memory used", _of(used, cpu.memory_total_bytes), bound),
            KeyFigure("Load, 1 min", load, "Runnable processes, averaged over a minute."),
        ]
    )
    if cpu.flags is None:
        st.caption("Half-precision instructions cannot be read here.")
    else:
        flags = " ".join(code(flag) for flag in cpu.flags) or "none"
        st.caption(f"Vector and half-precision instructions: {flags}")


def _of(used: float | None, total: float | None) -> str:
    if used is None or total is None:
        return "unknown"
    return f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB"


def _unit(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:,.0f} {unit}"


@st.fragment(run_every=EVERY_S)
def draw_telemetry() -> None:
    """The curves of every device, every two seconds."""
    found = recent(tuple(gpu.index for gpu in telemetry.machine_report().gpus))
    samples = found.update()
    for problem in found.problems:
        st.caption(escape(problem))
    curves = {name: own for name, own in by_device(samples).items() if len(own) > 1}
    if not curves:
        st.caption("The curves of the last two minutes begin with this look.")
    for number, (name, own) in enumerate(curves.items()):
        chart.see(f"{'CPU' if name == 'cpu' else name}, the last {own[-1].at - own[0].at:.0f} s")
        figure = telemetry_figure(own, own[-1].at)
        chart.show(figure, "machine-now", lambda own=own: pd.DataFrame(own), key=f"live-{number}")  # type: ignore[misc]  # a default of a lambda


@st.cache_resource(show_spinner=False)
def recent(gpus: tuple[int, ...]) -> RecentReadings:
    """Of NVML's GPUs with these numbers, and the CPU."""
    readers: list[DeviceReader] = []
    problems: list[str] = []
    for number in gpus:
        try:
            readers.append(GpuReader(f"GPU {number}", "", os.getpid(), pcie=False))
        except DeviceLost as lost:
            problems.append(str(lost))
    return RecentReadings([*readers, CpuReader(0)], problems)


@dataclass(slots=True)
class RecentReadings:
    """Readings of all devices, shared by all browsers: taken by the dashboard's own process, and
    only while a user looks."""

    readers: list[DeviceReader]
    problems: list[str]
    samples: deque[Sample] = field(default_factory=deque)
    read_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self) -> list[Sample]:
        """Read unless another session just did; the readings of the last two minutes."""
        with self.lock:
            now = time.time()
            if now - self.read_at > EVERY_S / 2:
                is_new = now - self.read_at > TOO_LONG_S
                found = [s for reader in tuple(self.readers) if (s := self._sample(reader, now))]
                self.samples.extend([] if is_new else found)
                self.read_at = now
            while self.samples and self.samples[0].at < now - KEPT_S:
                self.samples.popleft()
            return list(self.samples)

    def _sample(self, reader: DeviceReader, now: float) -> Sample | None:
        try:
            return Sample(reader.device, now, **reader.read(time.monotonic()))
        except DeviceLost as lost:
            self.problems.append(str(lost))
            self.readers.remove(reader)
            return None


def software(report: HardwareReport) -> dict[str, str]:
    """Versions; what is missing is said."""
    found = report.software
    cuda = found.torch_cuda or "torch was built without CUDA"
    return {
        "torch": found.torch or "not installed",
        "CUDA of torch": cuda,
        "cuDNN": found.cudnn or ("unknown" if found.torch_cuda else "none, without CUDA"),
        "NVIDIA driver": report.nvidia.driver or report.nvidia.message or "unknown",
        "newest CUDA of the driver": report.nvidia.cuda_driver or "no driver",
        "Python": found.python,
    }


def capability_answer(report: HardwareReport) -> str:
    """What to see in the table."""
    named = [gpu for gpu in report.gpus if gpu.capability]
    if not named:
        return "No NVIDIA GPU is here; the table says what one would give."
    infos = {gpu.capability: gpu.tensor_cores for gpu in named}
    return " ".join(
        f"{capability} ({info.architecture or 'not in the table'}) is here; its Tensor Cores are "
        f"{info.presence}."
        for capability, info in infos.items()
    )


def draw_capability(report: HardwareReport) -> None:
    """The table, its sources and a CSV."""
    table = rate_table(report)
    st.dataframe(table, hide_index=True, height="content")
    st.caption(escape(GTX_16))
    chart.download(lambda: table, "tensor-cores", key="tensor-cores")
    with chart.details("Sources of the table"):
        for number, source in enumerate(_sources(), start=1):
            st.markdown(escape(f"[{number}] {source}"))


def rate_table(report: HardwareReport) -> pd.DataFrame:
    """One row per capability; where GPUs are here, a column "here" names them."""
    numbers = {source: number for number, source in enumerate(_sources(), start=1)}
    rows = []
    for row in CAPABILITIES:
        here = ", ".join(gpu.name or "GPU" for gpu in report.gpus if _is_row(row, gpu.capability))
        flags = {DTYPE_LABELS[d]: "yes" if d in row.dtypes else "" for d in SHOWN_DTYPES}
        rows.append(
            {
                "capability": row.capability,
                "architecture": row.architecture,
                "generation": row.generation,
                **flags,
                "source": f"[{numbers[row.source]}]",
                **({"here": here} if report.gpus else {}),
            }
        )
    return pd.DataFrame(rows)


def _sources() -> list[str]:
    return list(dict.fromkeys(row.source for row in CAPABILITIES))


def _is_row(row: CapabilityRow, capability: str | None) -> bool:
    if capability is None:
        return False
    return capability == row.capability or (
        row.capability.endswith(".x") and capability.split(".")[0] == row.capability.split(".")[0]
    )


def draw_json(report: HardwareReport) -> None:
    """The whole report."""
    st.code(report_json(report), language="json")
