"""The words about a machine: what they must say, and what they must not claim."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from ampscope.hardware.describe import (
    describe_machine,
    one_line,
    report_json,
    sentence,
    uses_cuda,
)
from ampscope.hardware.gpu import Accelerator
from tests.helpers.hardware_reports import CPU_TORCH, named, report
from tests.helpers.nvml_replay import A100_MIG, GTX_1660_TI, H100

IMPORT_LIMIT_S = 0.5


def test_a_gpu_with_bf16() -> None:
    told = report(H100)
    words = sentence(told)
    assert "NVIDIA H100 80GB HBM3 (compute capability 9.0, Hopper)" in words
    assert "4th generation" in words
    assert "bf16, which needs no loss scale" in words
    assert "clocks are held down now (power cap)" in words
    assert "rehearse" not in words
    assert one_line(told) == (
        "NVIDIA H100 80GB HBM3 (capability 9.0, 80.0 GiB) · torch 2.13.0+cu130 · runs follow "
        "CUDA's own rules"
    )


def test_a_gpu_whose_tensor_cores_take_fp16_alone() -> None:
    words = sentence(report(named("Tesla T4", (7, 5))))
    assert "fp16, which needs a loss scale" in words
    assert "bf16 has no Tensor Cores here" in words


def test_a_gpu_without_tensor_cores_is_promised_nothing() -> None:
    words = sentence(report(GTX_1660_TI))
    assert "has no Tensor Cores" in words
    assert "faster" not in words


def test_a_gpu_that_the_table_does_not_know_is_unknown() -> None:
    words = sentence(report(named("NVIDIA Future", (14, 0))))
    assert "unknown" in words
    assert "faster" not in words


def test_several_gpus_are_counted_by_kind() -> None:
    told = report(H100, dict(H100), named("Tesla T4", (7, 5)))
    assert "2 × NVIDIA H100 80GB HBM3" in sentence(told)
    assert "Tesla T4" in one_line(told)


def test_mig_is_named() -> None:
    assert "GPU 0 is in MIG mode with 2 slices" in sentence(report(A100_MIG))


def test_a_lost_gpu_is_named_and_not_used() -> None:
    told = report(H100, lost_at=(0, "nvmlDeviceGetName"))
    assert not uses_cuda(told)
    assert sentence(told).startswith("GPU 0 does not answer")
    assert "rehearse" in sentence(told)


@pytest.mark.parametrize(
    ("flags", "has", "lacks"),
    [
        (("AVX2", "F16C", "AVX512-BF16"), "multiply bf16 (AVX512-BF16)", "no speed from fp16"),
        (("AVX512-FP16",), "multiply fp16 (AVX512-FP16)", "no speed from bf16"),
        (
            ("AMX-BF16", "AVX512-BF16", "AVX512-FP16"),
            "multiplies bf16 (AMX-BF16 and AVX512-BF16) and fp16 (AVX512-FP16)",
            "",
        ),
        (("AVX2", "F16C"), "multiplies neither bf16 nor fp16", ""),
        (None, "is unknown", ""),
    ],
)
def test_a_cpu(flags: tuple[str, ...] | None, has: str, lacks: str) -> None:
    told = report(software=CPU_TORCH, flags=flags)
    words = sentence(told)
    assert has in words
    assert lacks in words
    assert "rehearse CUDA's rules" in words
    assert "not what it does to the speed" in words
    assert words.endswith("not from a measurement.")
    assert "faster" not in words
    assert one_line(told) == (
        "CPU Some CPU, 2 cores · no CUDA · torch 2.13.0+cpu · probes rehearse CUDA's rules"
    )


def test_other_accelerators_are_named_as_unknown() -> None:
    told = report(software=CPU_TORCH, accelerators=(Accelerator("ROCm", "AMD GPU gfx942"),))
    assert "An AMD GPU gfx942 is here (ROCm in torch)" in sentence(told)
    assert "unknown" in sentence(told)


@pytest.mark.parametrize("gpus", [(), (H100, A100_MIG, GTX_1660_TI)])
def test_json_holds_the_report_and_the_words(gpus: tuple[Mapping[str, object], ...]) -> None:
    told = report(*gpus)
    data = json.loads(report_json(told))
    assert data["schema"] == 1
    assert data["sentence"] == sentence(told)
    assert data["cpu"]["usable_cores"] == 2
    for entry, gpu in zip(data["nvidia"]["gpus"], told.gpus, strict=True):
        assert entry["power_w"] == gpu.power_w
        assert entry["tensor_cores"]["presence"] == gpu.tensor_cores.presence
        assert tuple(entry["tensor_cores"]["dtypes"]) == gpu.tensor_cores.dtypes


def test_this_machine_has_a_sentence() -> None:
    told = describe_machine()
    assert sentence(told)
    assert "\n" not in one_line(told)
    assert json.loads(report_json(told))["cpu"]["architecture"] == told.cpu.architecture


def test_importing_takes_no_torch_and_little_time() -> None:
    """Best of five processes, in processor time: other work on the machine adds little to it."""
    code = (
        "import sys, time; start = time.process_time(); import ampscope.hardware.describe as d; "
        "elapsed = time.process_time() - start; d.describe_machine(); "
        "print(elapsed, 'torch' in sys.modules)"
    )
    times = []
    for _ in range(5):
        answer = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        elapsed, has_torch = answer.stdout.split()
        assert has_torch == "False"
        times.append(float(elapsed))
    assert min(times) < IMPORT_LIMIT_S
