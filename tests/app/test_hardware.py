"""Hardware: words, readings and the table, on machines of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.hardware.describe import HardwareReport, sentence
from ampscope.hardware.gpu import Accelerator
from ampscope.records import Machine, Rate, RunSpec, Sample, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from app import hardware, telemetry
from app.figures.hardware import alignment_figure, rates_figure
from app.runs import measurements
from tests.helpers import hardware_reports, stores
from tests.helpers.hardware_reports import H100, named, report
from tests.helpers.made_rates import aligned, ceilings_of, made

Open = Callable[..., AppTest]
MACHINES = {
    "cpu": report(),
    "h100": report(H100),
    "two": report(H100, named("NVIDIA GeForce GTX 1660 Ti", (7, 5))),
    "unknown": report(named("NVIDIA Future", (42, 0))),
    "cuda without driver": report(software=hardware_reports.CUDA_TORCH),
}


@pytest.fixture(params=MACHINES)
def shown(
    request: pytest.FixtureRequest, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> tuple[HardwareReport, AppTest]:
    found = MACHINES[request.param]
    monkeypatch.setattr(telemetry, "machine_report", lambda: found)
    return found, open_page("hardware")


def plain(text: str) -> str:
    return text.replace("\\", "").replace("\u2060", "")


def test_says_what_amp_can_and_cannot_give(shown: tuple[HardwareReport, AppTest]) -> None:
    found, app = shown
    assert not app.error
    assert not app.exception
    assert plain(app.markdown[0].value) == sentence(found)


def test_reads_every_gpu_and_the_cpu(shown: tuple[HardwareReport, AppTest]) -> None:
    found, app = shown
    labels = [metric.label for metric in app.metric]
    assert labels.count("SM clock") == len(found.gpus)
    assert "Cores for probes" in labels
    assert all(metric.value for metric in app.metric)


def test_the_table_names_the_gpus_that_are_here() -> None:
    table = hardware.rate_table(report(H100, named("Tesla T4", (7, 5))))
    here = dict(zip(table["capability"], table["here"], strict=True))
    assert here["7.5"] == "Tesla T4"
    assert here["9.0"] == H100["nvmlDeviceGetName"]
    assert here["8.0"] == ""
    assert "here" not in hardware.rate_table(report())


def test_the_table_has_the_dtypes_of_well_known_gpus() -> None:
    """NVIDIA's whitepapers: V100 fp16 only; A100 adds bf16, tf32, fp64; H100 adds fp8."""
    table = hardware.rate_table(report()).set_index("capability")
    assert table.loc["7.0", "fp16"] == "yes"
    assert table.loc["7.0", "bf16"] == ""
    assert [table.loc["8.0", d] for d in ("bf16", "tf32", "fp64")] == ["yes"] * 3
    assert table.loc["8.6", "fp64"] == ""
    assert table.loc["9.0", "fp8 e4m3"] == "yes"


def test_the_gtx_16_series_is_named(open_page: Open) -> None:
    said = plain("\n".join(str(c.value) for c in open_page("hardware").caption))
    assert "GTX 16 series" in said
    assert "no Tensor Cores" in said


BENCH = RunSpec(workload="", kind="bench")
ON_CPU = Machine("cpu", "Some CPU, 2 cores", "rehearsal", torch="2.13.0")
ON_A100 = Machine("cuda:0", "NVIDIA A100-SXM4-40GB", "cuda", "8.0", "2.13.0+cu130")
CPU_RATES = [
    *ceilings_of({"fp64": 0.08, "fp32": 0.16, "bf16": 0.4, "fp16": 0.003}),
    *ceilings_of({"tf32": None}, note="TF32 is a mode of NVIDIA's Tensor Cores."),
    made("fp32", 1e11, (512, 512, 512)),
    Rate("copy", "copy", "fp32", (2**26,), 0, 2**29, made("fp32", 1e11).timing, 0.0),
    *aligned("align_k", {512: 1.0, 513: 2.3, 520: 1.0, 521: 2.2}),
    *aligned("align_channels", {64: 1.0, 65: 1.5}, layout="NCHW"),
    made("fp16", None, (8, 64, 28, 28, 64), series="align_channels", note="Left out: slow."),
]


def benched(
    store: Path, rates: list[Rate], on: Machine = ON_CPU, state: State | None = State.FINISHED
) -> str:
    """A bench with these results; without a state it still runs."""
    writer = RunWriter.create(store, BENCH)
    writer.start(on)
    for rate in rates:
        writer.add_result(rate)
    if on.device != "cpu":
        held = [Sample(on.device, at, clock_reasons="power cap") for at in (1.0, 2.0)]
        writer.add_samples(held)
    if state is not None:
        writer.finish(state, "It broke." if state is State.FAILED else "")
    writer.close()
    return writer.run_id


def texts(app: AppTest) -> str:
    parts = [*app.markdown, *app.subheader, *app.caption, *app.warning, *app.info, *app.error]
    return plain("\n".join(str(part.value) for part in parts))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(flags=("AVX512-BF16",))
    monkeypatch.setattr(telemetry, "machine_report", lambda: found)


@pytest.mark.usefixtures("on_cpu")
def test_without_a_bench_it_offers_one(open_page: Open) -> None:
    app = open_page("hardware")
    assert not app.exception
    assert "Nothing has been measured here yet." in texts(app)
    assert [b.label for b in app.button][:2] == ["Measure this machine", "Measure quickly"]
    assert not any(b.disabled for b in app.button)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("button", "args"), [(0, ()), (1, ("quick",))])
def test_the_buttons_start_a_bench(
    open_page: Open, monkeypatch: pytest.MonkeyPatch, button: int, args: tuple[str, ...]
) -> None:
    asked: list[RunSpec] = []
    monkeypatch.setattr(measurements, "start", asked.append)
    app = open_page("hardware")
    app.button[button].click().run()
    assert not app.exception
    assert [(spec.kind, spec.args, spec.device) for spec in asked] == [("bench", args, "auto")]


@pytest.mark.usefixtures("on_cpu")
def test_a_finished_bench_is_answered_first(open_page: Open, store_path: Path) -> None:
    benched(store_path, CPU_RATES)
    app = open_page("hardware")
    assert not app.exception
    assert not app.error
    said = "Here bf16 matmuls run 2.5 times as fast as fp32's (400 GFLOP/s)"
    assert plain(app.subheader[0].value).startswith(said)
    figures = {m.label: m.value for m in app.metric}
    assert figures["bf16 matmuls"] == "400 GFLOP/s"
    assert "fp16 reaches under half" in texts(app)
    assert "K = 513 costs 2.3 times the time that K = 512 costs" in texts(app)
    assert "unknown to ampscope" in texts(app)
    table = next(t.value for t in app.dataframe if "vendor's figure" in t.value)
    rows = table.set_index("")
    assert rows.loc["bf16", "vendor's figure"] == "unknown"
    assert rows.loc["tf32", "reached"] == "not measured"
    assert "Tensor Cores" in rows.loc["tf32", "note"]
    assert rows.loc["copy", "size"] == "256 MiB"


@pytest.mark.usefixtures("on_cpu")
def test_a_gpus_bench_is_beside_its_datasheet(open_page: Open, store_path: Path) -> None:
    rates = ceilings_of({"fp32": 17.0, "tf32": 120.0, "bf16": 250.0, "fp16": 250.0})
    benched(store_path, rates, ON_A100)
    app = open_page("hardware")
    assert not app.exception
    table = next(t.value for t in app.dataframe if "vendor's figure" in t.value)
    assert table.set_index("").loc["bf16", "share of it"] == "80.1 %"
    assert "A100 datasheet, https" in texts(app)
    assert "power cap in 100%" in texts(app)


@pytest.mark.usefixtures("on_cpu")
def test_a_running_bench_shows_what_it_has(open_page: Open, store_path: Path) -> None:
    benched(store_path, ceilings_of({"fp32": 0.1}), state=None)
    app = open_page("hardware")
    assert not app.exception
    assert "Measuring." in texts(app)
    assert all(b.disabled for b in app.button if b.label.startswith("Measure"))
    assert [m.value for m in app.metric if m.label == "fp32 matmuls"] == ["100 GFLOP/s"]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rates", [[], CPU_RATES[:1], CPU_RATES[:4]])
def test_a_bench_that_failed_says_why_and_keeps_what_it_has(
    open_page: Open, store_path: Path, rates: list[Rate]
) -> None:
    benched(store_path, rates, state=State.FAILED)
    app = open_page("hardware")
    assert not app.exception
    assert "It broke." in texts(app)
    assert bool([m for m in app.metric if m.label == "bf16 matmuls"]) == (len(rates) == 4)


@pytest.mark.usefixtures("on_cpu")
def test_a_training_in_the_same_store_is_no_bench(open_page: Open, store_path: Path) -> None:
    stores.finished(store_path)
    app = open_page("hardware")
    assert not app.exception
    assert "Nothing has been measured here yet." in texts(app)


def test_several_gpus_can_be_chosen(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "machine_report", lambda: report(H100, H100))
    app = open_page("hardware")
    assert not app.exception
    choice = next(s for s in app.selectbox if s.label == "Device")
    assert choice.options == ["cuda:0", "cuda:1", "cpu"]


def test_a_device_that_is_not_measured_is_named(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report(accelerators=(Accelerator("XPU", "Intel GPU, device 0x56a0"),))
    monkeypatch.setattr(telemetry, "machine_report", lambda: found)
    app = open_page("hardware")
    assert "Not measured: Intel GPU, device 0x56a0 (XPU)." in texts(app)


def test_the_chart_has_quartiles_and_the_vendors_peaks(store_path: Path) -> None:
    from ampscope.analysis.ceilings import vendor_figures

    rates = [made("bf16", 250e12, spread=0.1), made("fp16", 240e12), made("fp32", 17e12)]
    figure = rates_figure(rates, vendor_figures("NVIDIA A100-SXM4-40GB"))
    lines = {t.name: t for t in figure.data if t.name}
    bars = lines["bf16"].error_y
    # Quartiles 5 % either side of the median time: its inverse is not symmetrical.
    assert bars.array[0] == pytest.approx(250e12 / 0.95 - 250e12)
    assert bars.arrayminus[0] == pytest.approx(250e12 - 250e12 / 1.05)
    peaks = {t.text[0]: t.y[0] for t in figure.data if t.text}
    assert peaks == {"vendor: bf16, fp16": 312e12, "vendor: fp32": 19.5e12}


def test_the_alignment_chart_marks_multiples_of_eight() -> None:
    figure = alignment_figure(CPU_RATES)
    k = next(t for t in figure.data if t.name == "fp16")
    assert list(k.x) == [512, 513, 520, 521]
    assert list(k.marker.symbol) == ["circle", "circle-open", "circle", "circle-open"]
    assert k.y[0] / k.y[1] == pytest.approx(2.3)


def test_results_survive_the_store(store_path: Path) -> None:
    run = benched(store_path, CPU_RATES)
    with Reader(store_path) as reader:
        assert reader.results(run) == CPU_RATES
