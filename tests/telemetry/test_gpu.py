"""A GPU beside a run, replayed from documented values (see tests/helpers/nvml_replay.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from ampscope.telemetry.gpu import GpuReader
from ampscope.telemetry.values import DeviceLost
from tests.helpers.nvml_replay import (
    GIB,
    H100,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    NVMLError,
    Refusal,
    ReplayedNvml,
)

OWN, OTHER = 4242, 777
# nvml.h: energy in mJ since the driver was loaded; throughput in KB/s, counter 0 is TX, 1 is RX.
BESIDE: Mapping[str, object] = {
    **H100,
    "nvmlDeviceGetTotalEnergyConsumption": 5_000_500,
    "nvmlDeviceGetPcieThroughput": {0: 1_000, 1: 2_000_000},
    "nvmlDeviceGetComputeRunningProcesses": [
        SimpleNamespace(pid=OWN, usedGpuMemory=GIB),
        SimpleNamespace(pid=OTHER, usedGpuMemory=GIB // 2),
    ],
}


@dataclass
class Nvml(ReplayedNvml):
    """With UUIDs, in NVML's order of the GPUs."""

    uuids: tuple[str, ...] = ("GPU-aaaa", "GPU-bbbb")
    asked: list[int] = field(default_factory=list)  # PCIe counters

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Mapping[str, object]:  # noqa: N802
        if uuid not in self.uuids[: len(self.gpus)]:
            raise NVMLError(NOT_FOUND)
        return self.gpus[self.uuids.index(uuid)]

    def _answer(self, function: str, *arguments: object) -> object:
        if function == "nvmlDeviceGetPcieThroughput":
            self.asked.append(int(str(arguments[1])))
        return super()._answer(function, *arguments)


def reader_of(gpu: Mapping[str, object], **more: object) -> GpuReader:
    return GpuReader("cuda:0", "aaaa", OWN, Nvml((gpu,), **more))  # type: ignore[arg-type]


def test_without_a_uuid_no_gpu_is_taken_for_the_one_in_use() -> None:
    """The numbers of torch and of NVML are not in the same order."""
    with pytest.raises(DeviceLost, match="cuda:1 could not be read beside the run"):
        GpuReader("cuda:1", "", OWN, Nvml((BESIDE, BESIDE)))


def test_a_mig_slice_is_found_by_its_uuid() -> None:
    """CUDA names a slice by a UUID of its own, without the prefix."""
    nvml = Nvml((BESIDE,), uuids=("MIG-aaaa",))
    assert GpuReader("cuda:0", "aaaa", OWN, nvml).read(0.0)["power_w"] == 118.4


def test_every_quantity_in_its_unit() -> None:
    reader = reader_of(BESIDE)
    reader.read(0.0)
    assert reader.read(0.5) == {
        "busy_percent": 37.0,
        "memory_used_bytes": 2 * GIB,
        "own_memory_bytes": GIB,
        "power_w": 118.4,
        "energy_j": 5000.5,
        "temperature_c": 41,
        "clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "pcie_rx_bytes_s": 2e9,
        "pcie_tx_bytes_s": 1e6,
        "clock_reasons": "power cap",
        "other_processes": 1,
    }
    reader.close()


def test_pcie_is_asked_one_way_at_a_time_and_once_a_second() -> None:
    """Each of these questions waits for 20 ms."""
    nvml = Nvml((BESIDE,))
    reader = GpuReader("cuda:0", "aaaa", OWN, nvml)
    for tenth in range(20):
        reader.read(tenth / 10)
    assert nvml.asked == [1, 0, 1, 0]
    reader.close()


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
@pytest.mark.parametrize(
    "function", [name for name in BESIDE if name not in ("nvmlDeviceGetName", "nvmlDeviceGetCount")]
)
def test_a_refused_question_is_no_failure(function: str, code: int) -> None:
    reader = reader_of({**BESIDE, function: Refusal(code)})
    whole = reader_of(BESIDE)
    for now in (0.0, 0.5):
        refused, answered = reader.read(now), whole.read(now)
    assert set(refused) == set(answered)
    assert all(value in (None, "", answered[name]) for name, value in refused.items())  # type: ignore[literal-required]
    reader.close()
    whole.close()


def test_torchs_number_is_not_nvmls() -> None:
    """With CUDA_VISIBLE_DEVICES=1 the second GPU is torch's first: the UUID decides."""
    second = {**BESIDE, "nvmlDeviceGetPowerUsage": 222_000}
    reader = GpuReader("cuda:0", "bbbb", OWN, Nvml((BESIDE, second)))
    assert reader.read(0.0)["power_w"] == 222.0
    assert reader.device == "cuda:0"
    reader.close()


def test_in_a_container_processes_have_other_numbers() -> None:
    """Then the run's own is not found, and how many are others' is unknown."""
    strangers = [SimpleNamespace(pid=OTHER, usedGpuMemory=GIB)]
    reader = reader_of({**BESIDE, "nvmlDeviceGetComputeRunningProcesses": strangers})
    found = reader.read(0.0)
    assert (found["own_memory_bytes"], found["other_processes"]) == (None, None)
    reader.close()


def test_idle_is_no_reason_and_several_are_all_named() -> None:
    for mask, words in ((0x1, ""), (0x4 | 0x20 | 0x1, "power cap,software thermal slowdown")):
        reader = reader_of({**BESIDE, "nvmlDeviceGetCurrentClocksEventReasons": mask})
        assert reader.read(0.0)["clock_reasons"] == words
        reader.close()


def test_without_a_driver() -> None:
    with pytest.raises(DeviceLost, match=r"^cuda:0 could not be read beside the run: No NVIDIA"):
        GpuReader("cuda:0", "aaaa", OWN, Nvml((BESIDE,), start=Refusal(LIBRARY_NOT_FOUND)))


def test_a_gpu_that_nvml_does_not_know() -> None:
    nvml = Nvml((BESIDE,))
    with pytest.raises(DeviceLost, match=r"NVML knows no GPU cccc\.$"):
        GpuReader("cuda:0", "cccc", OWN, nvml)
    assert nvml.depth == 0  # shut down again


def test_a_gpu_that_vanishes_is_one_sentence() -> None:
    nvml = Nvml((BESIDE,))
    reader = GpuReader("cuda:0", "aaaa", OWN, nvml)
    reader.read(0.0)
    nvml.lost_at = (0, "nvmlDeviceGetPowerUsage")
    with pytest.raises(DeviceLost, match=r"^cuda:0 stopped answering NVML \(NVML error 15\)\.$"):
        reader.read(0.1)
    reader.close()
    assert nvml.depth == 0
