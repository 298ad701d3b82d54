"""Reports of made-up machines, for the tests of the words about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ampscope.hardware.cpu import CpuReading
from ampscope.hardware.describe import HardwareReport, Software, describe_machine
from ampscope.hardware.gpu import Accelerator
from tests.helpers.nvml_replay import H100, LIBRARY_NOT_FOUND, Refusal, ReplayedNvml

CUDA_TORCH = Software("3.12.1", "2.13.0+cu130", "13.0", None, None, "9.15.1.9", None)
CPU_TORCH = replace(CUDA_TORCH, torch="2.13.0+cpu", torch_cuda=None, cudnn=None)
CPU = CpuReading(
    model="Some CPU",
    architecture="x86_64",
    physical_cores=4,
    logical_cores=8,
    usable_cores=2,
    flags=(),
    memory_total_bytes=2**34,
    memory_available_bytes=2**33,
    memory_limit_bytes=None,
    load_1min=0.5,
)


def report(
    *gpus: Mapping[str, object],
    software: Software = CUDA_TORCH,
    flags: tuple[str, ...] | None = (),
    accelerators: tuple[Accelerator, ...] = (),
    **nvml: object,
) -> HardwareReport:
    start = Refusal(LIBRARY_NOT_FOUND) if not gpus else None
    replayed = ReplayedNvml(gpus, start=start, **nvml)  # type: ignore[arg-type]
    return replace(
        describe_machine(replayed),
        software=software,
        cpu=replace(CPU, flags=flags),
        accelerators=accelerators,
    )


def named(name: str, capability: tuple[int, int]) -> Mapping[str, object]:
    return {**H100, "nvmlDeviceGetName": name, "nvmlDeviceGetCudaComputeCapability": capability}
