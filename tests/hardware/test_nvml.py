"""NVML that does not start, and the constants that ampscope writes down for it."""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from ampscope.hardware import gpu as room
from ampscope.hardware import gpu as talk
from ampscope.hardware.describe import one_line, sentence
from ampscope.hardware.gpu import read_gpus
from tests.helpers.hardware_reports import CPU_TORCH, report
from tests.helpers.nvml_replay import (
    A100_MIG,
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    GTX_1660_TI,
    H100,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    SYSTEM,
    UNKNOWN,
    VERSION_MISMATCH,
    Refusal,
    ReplayedNvml,
)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (LIBRARY_NOT_FOUND, "No NVIDIA driver was found"),
        (DRIVER_NOT_LOADED, "not loaded"),
        (NO_PERMISSION, "no permission"),
        (VERSION_MISMATCH, "differ in version"),
        (UNKNOWN, "NVML error 999"),
    ],
)
def test_nvml_that_does_not_start_is_one_sentence(code: int, words: str) -> None:
    survey = read_gpus(ReplayedNvml(start=Refusal(code)))
    assert words in survey.message
    assert survey.message.endswith(".")
    assert (survey.gpus, survey.driver, survey.cuda_driver) == ((), None, None)


@pytest.mark.parametrize("file", ["nvidia0", "nvhost-gpu"])
def test_no_nvml_is_not_no_cuda(tmp_path: Path, file: str) -> None:
    """In a container without the driver's utility part, and on a Jetson, torch sees the GPU."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / file).touch()
    (tmp_path / "dev" / "nvidiactl").touch()
    survey = read_gpus(ReplayedNvml(start=Refusal(LIBRARY_NOT_FOUND)), tmp_path)
    assert f"/dev/{file}" in survey.message
    machine = replace(report(), nvidia=survey)
    assert "no CUDA" not in one_line(machine)
    assert "Probes run on the CPU" not in sentence(machine)
    without_cuda = replace(machine, software=CPU_TORCH)
    assert "no CUDA" in one_line(without_cuda)
    assert "Probes run on the CPU" in sentence(without_cuda)


@pytest.mark.parametrize("code", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED])
def test_where_no_device_file_is_nothing_is_guessed(tmp_path: Path, code: int) -> None:
    survey = read_gpus(ReplayedNvml(start=Refusal(code)), tmp_path)
    assert survey.unread == ""
    assert "no CUDA" in one_line(replace(report(), nvidia=survey))


def test_a_driver_without_a_gpu() -> None:
    survey = read_gpus(ReplayedNvml())
    assert survey.gpus == ()
    assert "sees no GPU" in survey.message


def test_a_driver_that_is_lost_before_the_first_gpu() -> None:
    survey = read_gpus(ReplayedNvml((H100,), {"nvmlDeviceGetCount": Refusal(GPU_IS_LOST)}))
    assert "stopped answering" in survey.message


def test_without_nvidia_ml_py(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *rest: object) -> ModuleType:
        if name == "pynvml":
            raise ImportError(name)
        return real_import(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert "pip install nvidia-ml-py" in read_gpus().message


def test_codes_and_names_are_those_of_nvidia_ml_py() -> None:
    """The installed binding, generated from nvml.h, is the oracle for every constant used."""
    import pynvml

    assert set(talk.GONE_CODES) == {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_GPU_NOT_FOUND,
    }
    assert set(talk.INIT_SENTENCES) == {
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
    assert (room.TEMPERATURE_GPU, room.CLOCK_SM, room.CLOCK_MEMORY) == (
        pynvml.NVML_TEMPERATURE_GPU,
        pynvml.NVML_CLOCK_SM,
        pynvml.NVML_CLOCK_MEM,
    )
    bits = {word: bit for bit, word in room.CLOCK_REASONS}
    assert bits["power cap"] == pynvml.nvmlClocksEventReasonSwPowerCap
    assert bits["hardware slowdown"] == pynvml.nvmlClocksEventReasonHwSlowdown
    assert bits["software thermal slowdown"] == pynvml.nvmlClocksEventReasonSwThermalSlowdown
    assert bits["hardware thermal slowdown"] == pynvml.nvmlClocksEventReasonHwThermalSlowdown
    assert bits["power brake"] == pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    assert bits["sync boost"] == pynvml.nvmlClocksEventReasonSyncBoost
    assert bits["idle"] == pynvml.nvmlClocksEventReasonGpuIdle
    assert sum(bits.values()) == pynvml.nvmlClocksEventReasonAll
    for function in (*H100, *A100_MIG, *GTX_1660_TI, *SYSTEM, "nvmlDeviceGetHandleByIndex"):
        assert callable(getattr(pynvml, function))
