"""NVML readings, replayed from documented values (see tests/helpers/nvml_replay.py)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace

import pytest

from ampscope.hardware.capability import Presence
from ampscope.hardware.gpu import GpuReading, cuda_version_text, read_gpus
from tests.helpers.nvml_replay import (
    A100_MIG,
    GIB,
    GPU_IS_LOST,
    GTX_1660_TI,
    H100,
    NO_PERMISSION,
    NOT_SUPPORTED,
    SYSTEM,
    UNKNOWN,
    Refusal,
    ReplayedNvml,
)

# What the replayed H100 means, in the units of GpuReading.
H100_READING = GpuReading(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    capability="9.0",
    memory_total_bytes=80 * GIB,
    memory_used_bytes=2 * GIB,
    gpu_busy_percent=37,
    memory_busy_percent=12,
    temperature_c=41,
    power_w=118.4,
    power_limit_w=700.0,
    sm_clock_mhz=1755,
    sm_clock_max_mhz=1980,
    memory_clock_mhz=2619,
    clock_reasons=("power cap",),
    mig_enabled=False,
)
# Which fields an unsupported call takes away; written down apart from the table in gpu.py.
FIELDS_OF_CALL = {
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetCudaComputeCapability": {"capability"},
    "nvmlDeviceGetMemoryInfo": {"memory_total_bytes", "memory_used_bytes"},
    "nvmlDeviceGetUtilizationRates": {"gpu_busy_percent", "memory_busy_percent"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"sm_clock_max_mhz"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"clock_reasons"},
    "nvmlDeviceGetMigMode": {"mig_enabled"},
}


def test_every_question_is_answered_in_its_unit() -> None:
    nvml = ReplayedNvml((H100,))
    survey = read_gpus(nvml)
    assert survey.gpus == (H100_READING,)
    assert (survey.driver, survey.cuda_driver, survey.message) == ("580.65.06", "13.0", "")
    assert nvml.depth == 0  # shut down again


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN])
@pytest.mark.parametrize("function", H100)
def test_a_refused_question_costs_its_own_fields_and_no_others(function: str, code: int) -> None:
    survey = read_gpus(ReplayedNvml(({**H100, function: Refusal(code)},)))
    expected = replace(H100_READING, **dict.fromkeys(FIELDS_OF_CALL[function]))
    assert survey.gpus == (expected,)


@pytest.mark.parametrize("function", SYSTEM)
def test_a_refused_system_question_is_none(function: str) -> None:
    survey = read_gpus(ReplayedNvml((H100,), {**SYSTEM, function: Refusal(NOT_SUPPORTED)}))
    assert None in (survey.driver, survey.cuda_driver)
    assert survey.gpus == (H100_READING,)


def test_a_function_that_nvidia_ml_py_lacks_is_none() -> None:
    without = {k: v for k, v in H100.items() if k != "nvmlDeviceGetMigMode"}
    assert read_gpus(ReplayedNvml((without,))).gpus == (replace(H100_READING, mig_enabled=None),)


def test_a_geforce_answers_half_of_the_questions() -> None:
    (gpu,) = read_gpus(ReplayedNvml((GTX_1660_TI,))).gpus
    assert gpu.name == "NVIDIA GeForce GTX 1660 Ti"  # bytes are decoded
    assert gpu.clock_reasons == ("idle",)  # by the older function's name
    assert gpu.throttled_by == ()
    assert (gpu.power_limit_w, gpu.mig_enabled, gpu.problem) == (None, None, "")
    assert gpu.tensor_cores.presence is Presence.ABSENT


def test_mig_slices_are_listed_with_their_own_memory() -> None:
    (gpu,) = read_gpus(ReplayedNvml((A100_MIG,))).gpus
    assert gpu.mig_enabled is True
    assert gpu.gpu_busy_percent is None
    assert [(s.index, s.name, s.memory_total_bytes) for s in gpu.mig_slices] == [
        (0, "NVIDIA A100 MIG 3g.20gb", 20 * GIB),
        (2, "NVIDIA A100 MIG 3g.20gb", None),
    ]


def test_a_mig_slice_that_is_lost_is_a_problem_of_its_gpu() -> None:
    lost = {**A100_MIG, "nvmlDeviceGetMigDeviceHandleByIndex": Refusal(GPU_IS_LOST)}
    (gpu,) = read_gpus(ReplayedNvml((lost,))).gpus
    assert gpu.name == "NVIDIA A100-SXM4-40GB"
    assert gpu.problem


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", *H100])
def test_a_gpu_that_vanishes_keeps_what_it_had_said(function: str) -> None:
    second: Mapping[str, object] = dict(H100)  # another object, the same answers
    nvml = ReplayedNvml((second, H100), lost_at=(0, function))
    lost, healthy = read_gpus(nvml).gpus
    assert healthy == replace(H100_READING, index=1)
    assert lost.problem.startswith("GPU 0 does not answer")
    order = ["nvmlDeviceGetHandleByIndex", *H100]
    asked_before = [FIELDS_OF_CALL[f] for f in order[1 : order.index(function)]]
    kept = set().union(*asked_before) - {"memory_clock_mhz"}  # asked after the highest SM clock
    for field in {f.name for f in fields(GpuReading)} - {"problem", "mig_slices"}:
        possible = (getattr(H100_READING, field),) if field in kept else (None, 2619)
        assert getattr(lost, field) in (possible if field != "index" else (0,))
    assert nvml.depth == 0


@pytest.mark.parametrize(("number", "text"), [(13000, "13.0"), (12040, "12.4"), (11080, "11.8")])
def test_cuda_version_text(number: int, text: str) -> None:
    assert cuda_version_text(number) == text


def test_this_machine_is_read_without_an_exception() -> None:
    survey = read_gpus()
    assert bool(survey.gpus) != bool(survey.message)


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="nvidia-smi is the oracle here")
def test_readings_agree_with_nvidia_smi() -> None:
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    survey = read_gpus()
    assert len(survey.gpus) == len(lines), sys.version
    for gpu, line in zip(survey.gpus, lines, strict=True):
        name, capability, mebibytes, driver = (part.strip() for part in line.split(","))
        assert (gpu.name, gpu.capability, survey.driver) == (name, capability, driver)
        assert gpu.memory_total_bytes is not None
        assert abs(gpu.memory_total_bytes / 2**20 - int(mebibytes)) <= 1
