"""Hardware: words, readings and the table, on machines of several kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.hardware.describe import HardwareReport, sentence
from app import capability_table, machine
from tests import hardware_reports
from tests.hardware_reports import H100, named, report

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
    monkeypatch.setattr(machine, "report", lambda: found)
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
    table = capability_table.frame(report(H100, named("Tesla T4", (7, 5))))
    here = dict(zip(table["capability"], table["here"], strict=True))
    assert here["7.5"] == "Tesla T4"
    assert here["9.0"] == H100["nvmlDeviceGetName"]
    assert here["8.0"] == ""
    assert "here" not in capability_table.frame(report())


def test_the_table_has_the_dtypes_of_well_known_gpus() -> None:
    """NVIDIA's whitepapers: V100 fp16 only; A100 adds bf16, tf32, fp64; H100 adds fp8."""
    table = capability_table.frame(report()).set_index("capability")
    assert table.loc["7.0", "fp16"] == "yes"
    assert table.loc["7.0", "bf16"] == ""
    assert [table.loc["8.0", d] for d in ("bf16", "tf32", "fp64")] == ["yes"] * 3
    assert table.loc["8.6", "fp64"] == ""
    assert table.loc["9.0", "fp8 e4m3"] == "yes"


def test_the_gtx_16_series_is_named(open_page: Open) -> None:
    said = plain("\n".join(str(c.value) for c in open_page("hardware").caption))
    assert "GTX 16 series" in said
    assert "no Tensor Cores" in said
