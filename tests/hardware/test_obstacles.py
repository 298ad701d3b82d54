"""A GPU that is here and that torch cannot use: who says so, when, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from streamlit.testing.v1 import AppTest

from ampscope import extensions
from ampscope.cli import diagnose, progress
from ampscope.cli.main import COMMANDS, main
from ampscope.errors import BadInput
from ampscope.hardware import describe
from ampscope.hardware.describe import (
    HardwareReport,
    Software,
    one_line,
    sentence,
    unused_gpu,
    uses_cuda,
)
from ampscope.records import RunSpec
from app import links, telemetry
from app.text import escape
from tests.helpers.hardware_reports import CPU_TORCH, CUDA_TORCH, named, report
from tests.helpers.nvml_replay import H100, NO_PERMISSION, SYSTEM, Refusal
from tests.helpers.script_runner import write_script

CUDA_OF_THE_DRIVER = "nvmlSystemGetCudaDriverVersion_v2"
OLD_DRIVER = {**SYSTEM, CUDA_OF_THE_DRIVER: 12040, "nvmlSystemGetDriverVersion": "550.54.15"}
V100 = named("Tesla V100-SXM2-16GB", (7, 0))
B200 = named("NVIDIA B200", (10, 0))
P100 = named("Tesla P100-PCIE-16GB", (6, 0))
FOR_CUDA_12_6 = replace(CUDA_TORCH, torch="2.13.0+cu126", torch_cuda="12.6")
FOR_CUDA_12_8 = replace(CUDA_TORCH, torch="2.13.0+cu128", torch_cuda="12.8")
FOR_CUDA_12_9 = replace(CUDA_TORCH, torch="2.13.0+cu129", torch_cuda="12.9")


@pytest.mark.parametrize(
    ("gpu", "software", "system", "why", "remedy"),
    [
        (H100, CPU_TORCH, SYSTEM, "built without CUDA", "install its CUDA build"),
        (H100, replace(CPU_TORCH, torch=None), SYSTEM, "torch is not installed", ""),
        (H100, replace(CUDA_TORCH, visible_devices=""), SYSTEM, "CUDA_VISIBLE_DEVICES", "unset"),
        *(
            (H100, replace(CUDA_TORCH, visible_devices=listed), SYSTEM, "hides every GPU", "unset")
            for listed in ("-1", "-1,0", "NoDevFiles", "5", "0,0", "void")
        ),
        (H100, CUDA_TORCH, OLD_DRIVER, "driver 550.54.15 runs CUDA 12.4", "for CUDA 12"),
        (V100, CUDA_TORCH, SYSTEM, "before compute capability 7.5", "for CUDA 12.6"),
        (V100, FOR_CUDA_12_9, SYSTEM, "before compute capability 7.5", "for CUDA 12.6"),
        (P100, FOR_CUDA_12_8, SYSTEM, "before compute capability 7.0", "for CUDA 12.6"),
        (B200, FOR_CUDA_12_6, SYSTEM, "does not know compute capability 10.0", "12.8 or newer"),
    ],
)
def test_a_gpu_that_torch_cannot_use(
    gpu: Mapping[str, object],
    software: Software,
    system: Mapping[str, object],
    why: str,
    remedy: str,
) -> None:
    found = report(gpu, software=software, system=system)
    assert not uses_cuda(found)
    said = unused_gpu(found)
    assert "torch cannot use it" in said
    assert why in said
    assert remedy in said
    assert said.count(". ") == 0  # one sentence
    assert said.endswith(".")
    assert said in sentence(found)
    assert "no CUDA" in one_line(found)


@pytest.mark.parametrize(
    ("gpus", "software", "system"),
    [
        *(
            ((H100, H100), replace(CUDA_TORCH, visible_devices=listed), SYSTEM)
            for listed in ("1", "1,0", "0,5", "GPU-1234", "MIG-1234")
        ),
        ((H100,), CUDA_TORCH, {**SYSTEM, CUDA_OF_THE_DRIVER: 13020}),
        ((H100,), CUDA_TORCH, {**SYSTEM, CUDA_OF_THE_DRIVER: Refusal(NO_PERMISSION)}),
        ((H100,), FOR_CUDA_12_6, SYSTEM),
        ((V100,), FOR_CUDA_12_6, OLD_DRIVER),
        ((V100, H100), CUDA_TORCH, SYSTEM),  # one of the two is usable
        ((V100,), FOR_CUDA_12_8, SYSTEM),
        ((P100,), replace(FOR_CUDA_12_8, torch="2.13.0a0+git1234567"), SYSTEM),  # built from source
        ((B200,), FOR_CUDA_12_8, SYSTEM),
        ((B200,), CUDA_TORCH, SYSTEM),
    ],
)
def test_what_is_no_obstacle(
    gpus: tuple[Mapping[str, object], ...], software: Software, system: Mapping[str, object]
) -> None:
    assert unused_gpu(report(*gpus, software=software, system=system)) == ""


def test_without_a_gpu_nothing_is_said() -> None:
    assert unused_gpu(report(software=CUDA_TORCH)) == unused_gpu(report(software=CPU_TORCH)) == ""


# Who says it: every command that runs something on this machine, before it starts, and Home.


@pytest.fixture
def on_old_driver(monkeypatch: pytest.MonkeyPatch) -> str:
    """This machine has an H100 and a driver that the installed torch cannot use. Nothing can be
    started: what a command says, it says before."""
    found = report(H100, system=OLD_DRIVER)

    def refuse(*_: object, **__: object) -> None:
        raise BadInput("Started.")

    monkeypatch.setattr(progress, "describe_machine", lambda: found)
    if where := COMMANDS.get("batch-size"):
        asking = extensions.load(where).callback.__globals__
        monkeypatch.setitem(asking, "describe_machine", lambda: found)
    monkeypatch.setattr(progress, "launch", refuse)
    monkeypatch.setattr(diagnose, "run_diagnosis", refuse)
    monkeypatch.setattr(diagnose, "ScriptRuns", refuse)
    return unused_gpu(found)


MEASURED = [c for c in ("probe", "compare", "tensor-cores", "batch-size") if c in COMMANDS]


@pytest.mark.parametrize("command", [*MEASURED, "hardware", "diagnose", "run"])
def test_a_command_says_it_before_anything_starts(
    on_old_driver: str, tmp_path: Path, command: str
) -> None:
    script = write_script(tmp_path, "train.py", "print(1)")
    rest = {
        "hardware": ["--bench"],
        "diagnose": [str(script)],
        "run": [str(script)],
        "batch-size": ["gpt", "--memory-limit", "512"],
    }.get(command, ["gpt"])
    done = CliRunner().invoke(main, [command, "--store", str(tmp_path / "runs.db"), *rest])
    said = done.stderr.splitlines()
    assert said.index(on_old_driver) < said.index("ampscope: Started.")
    assert on_old_driver not in done.stdout  # which may be JSON


@pytest.mark.parametrize("command", MEASURED)
def test_a_run_on_the_cpu_that_was_asked_for_is_told_nothing(
    on_old_driver: str, tmp_path: Path, command: str
) -> None:
    arguments = [command, "gpt", "--device", "cpu", "--store", str(tmp_path / "runs.db")]
    arguments += ["--memory-limit", "512"] if command == "batch-size" else []
    assert on_old_driver not in CliRunner().invoke(main, arguments).stderr


def test_home_says_it(open_page: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(H100, system=OLD_DRIVER)
    monkeypatch.setattr(telemetry, "describe_machine", lambda: found)
    telemetry.machine_report.clear()
    try:
        for page in (
            "home",
            "new_probe",
            *links.EXTENSION_ENTRIES.keys() & {"compare"},
            "diagnosis",
        ):
            assert escape(unused_gpu(found)) in [w.value for w in open_page(page).warning], page
    finally:
        telemetry.machine_report.clear()


def test_a_run_that_finds_no_device_for_an_unknown_reason_says_that_it_rehearses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver is new enough and torch a CUDA build, and yet the run takes the CPU."""
    run_on(monkeypatch, tmp_path, report(H100), "auto")
    assert "torch found no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_run_on_the_cpu_is_as_it_should_be_where_it_was_asked_for_or_no_gpu_is_here(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    device: str,
) -> None:
    machine = report(H100) if device == "cpu" else report(software=CPU_TORCH)
    run_on(monkeypatch, tmp_path, machine, device)
    assert "torch found" not in capsys.readouterr().err


def run_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: HardwareReport, device: str
) -> None:
    """Train two steps on this machine's CPU, while NVML shows ``machine``."""
    monkeypatch.setattr(progress, "describe_machine", lambda: machine)
    monkeypatch.setattr(describe, "describe_machine", lambda: machine)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spec = RunSpec(workload="lenet", size="tiny", precision="fp32", steps=2, device=device)
    progress.start_together([spec], tmp_path / "runs.db")
