"""Why torch does not reach a GPU that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ampscope.hardware.describe import Software, obstacles, one_line, sentence, uses_cuda
from tests.helpers.hardware_reports import CPU_TORCH, CUDA_TORCH, named, report
from tests.helpers.nvml_replay import H100, NO_PERMISSION, SYSTEM, Refusal


@pytest.mark.parametrize(
    ("gpu", "software", "system", "words"),
    [
        (H100, CPU_TORCH, SYSTEM, "built without CUDA"),
        (H100, replace(CPU_TORCH, torch=None), SYSTEM, "torch is not installed"),
        (H100, replace(CUDA_TORCH, visible_devices=""), SYSTEM, "CUDA_VISIBLE_DEVICES"),
        (H100, replace(CUDA_TORCH, visible_devices="-1"), SYSTEM, "CUDA_VISIBLE_DEVICES"),
        (
            H100,
            CUDA_TORCH,
            {**SYSTEM, "nvmlSystemGetCudaDriverVersion_v2": 12040},
            "this one runs CUDA 12.4",
        ),
        (
            named("Tesla V100-SXM2-16GB", (7, 0)),
            CUDA_TORCH,
            SYSTEM,
            "before compute capability 7.5",
        ),
    ],
)
def test_a_gpu_that_torch_does_not_reach(
    gpu: Mapping[str, object], software: Software, system: Mapping[str, object], words: str
) -> None:
    told = report(gpu, software=software, system=system)
    assert not uses_cuda(told)
    assert words in " ".join(obstacles(told))
    assert "here, but torch does not reach it" in sentence(told)
    assert words in sentence(told)
    assert "no CUDA" in one_line(told)


@pytest.mark.parametrize(
    ("software", "system"),
    [
        (replace(CUDA_TORCH, visible_devices="1"), SYSTEM),
        (CUDA_TORCH, {**SYSTEM, "nvmlSystemGetCudaDriverVersion_v2": 13020}),
        (CUDA_TORCH, {**SYSTEM, "nvmlSystemGetCudaDriverVersion_v2": Refusal(NO_PERMISSION)}),
        (replace(CUDA_TORCH, torch_cuda="12.6"), SYSTEM),
    ],
)
def test_what_is_no_obstacle(software: Software, system: Mapping[str, object]) -> None:
    assert obstacles(report(H100, software=software, system=system)) == ()
