"""Eligibility against NVIDIA's table and guide, and CPUs of known generations."""

from __future__ import annotations

import pytest

from ampscope.hardware.capability import Fit, misses, on_cpu, on_gpu, padded_sizes
from ampscope.records import Dimension

A100 = ("8.0", "NVIDIA A100-SXM4-40GB")
H100 = ("9.0", "NVIDIA H100 80GB HBM3")
V100 = ("7.0", "Tesla V100-SXM2-16GB")
T4 = ("7.5", "Tesla T4")
GTX_1660 = ("7.5", "NVIDIA GeForce GTX 1660 Ti")
FITS = (Dimension("m", 1024), Dimension("n", 4096), Dimension("k", 768))
GPT2_HEAD = (Dimension("m", 1024), Dimension("n", 50257), Dimension("k", 768))


@pytest.mark.parametrize(
    ("gpu", "dtype", "fit"),
    [
        (A100, "bf16", Fit.ELIGIBLE),
        (A100, "fp16", Fit.ELIGIBLE),
        (A100, "tf32", Fit.ELIGIBLE),
        (A100, "fp64", Fit.ELIGIBLE),
        (A100, "fp32", Fit.NOT),  # TF32 switched off
        (A100, "e4m3", Fit.NOT),  # fp8 came with Ada and Hopper
        (V100, "fp16", Fit.ELIGIBLE),
        (V100, "bf16", Fit.NOT),  # Volta: fp16 alone
        (V100, "tf32", Fit.NOT),
        (T4, "fp16", Fit.ELIGIBLE),
        (T4, "bf16", Fit.NOT),
        (GTX_1660, "fp16", Fit.NOT),  # TU116 has none
        (("6.0", "Tesla P100"), "fp16", Fit.NOT),
        (("99.0", "NVIDIA Future"), "fp16", Fit.UNKNOWN),
        (("7.5", "Graphics Device"), "fp16", Fit.UNKNOWN),
    ],
)
def test_gpus(gpu: tuple[str, str], dtype: str, fit: Fit) -> None:
    found = on_gpu(*gpu, dtype, FITS)
    assert found.fit is fit
    assert found.reason.endswith(".")


def test_tf32_switched_off_is_named() -> None:
    assert "TF32 switched off" in on_gpu(*A100, "fp32", FITS).reason
    assert "TF32" not in on_gpu(*V100, "fp32", FITS).reason


def test_fp8_takes_multiples_of_16_alone() -> None:
    """torch._scaled_mm raises for others: that is no matmul at reduced efficiency."""
    refused = on_gpu(*H100, "e4m3", (Dimension("m", 7), Dimension("n", 50257), Dimension("k", 768)))
    assert refused.fit is Fit.NOT
    assert "n = 50,257: fp8 matmuls take multiples of 16 alone" in refused.reason
    rows = on_gpu(*H100, "e4m3", (Dimension("m", 7), Dimension("n", 64), Dimension("k", 768)))
    assert rows.fit is Fit.REDUCED
    assert on_gpu(*H100, "e4m3", FITS).fit is Fit.ELIGIBLE


def test_narrow_loads_are_said_of_contiguous_dimensions_alone() -> None:
    reason = on_gpu(
        *A100, "bf16", (Dimension("m", 7), Dimension("n", 64), Dimension("k", 64))
    ).reason
    assert "Where such a dimension is contiguous in memory, loads are narrower" in reason
    assert "any other leaves its last tile partly empty" in reason


def test_a_dimension_that_misses_makes_it_slower_and_never_unfit() -> None:
    found = on_gpu(*A100, "bf16", GPT2_HEAD)
    assert found.fit is Fit.REDUCED
    assert "n = 50,257: no multiple of 8" in found.reason
    both = on_gpu(*A100, "bf16", (Dimension("m", 7), Dimension("n", 9), Dimension("k", 8)))
    assert "m = 7, n = 9: no multiples of 8" in both.reason


@pytest.mark.parametrize(
    ("dtype", "multiple"), [("fp16", 8), ("bf16", 8), ("tf32", 4), ("int8", 16), ("e4m3", 16)]
)
def test_multiples_are_16_bytes(dtype: str, multiple: int) -> None:
    assert not misses(dtype, [Dimension("n", 3 * multiple)])
    assert misses(dtype, [Dimension("n", 3 * multiple + multiple // 2)])


def test_fp32_without_tf32_has_no_rule() -> None:
    assert not misses("fp32", [Dimension("n", 50257)])


@pytest.mark.parametrize(
    ("dtype", "sizes", "expected"),
    [
        ("bf16", {"m": 1024, "n": 50257, "k": 768}, [{"n": 50264}, {"n": 50304}]),
        ("fp16", {"m": 64, "n": 10, "k": 500}, [{"n": 16, "k": 504}]),  # under 512: 8 alone
        ("tf32", {"n": 50257}, [{"n": 50260}, {"n": 50304}]),
        ("fp16", {"m": 8, "n": 16, "k": 24}, []),
        ("fp16", {"n": 569}, [{"n": 576}]),  # the next multiple of 8 is one of 64
        ("fp32", {"n": 50257}, []),
    ],
)
def test_padded_sizes(dtype: str, sizes: dict[str, int], expected: list[dict[str, int]]) -> None:
    assert list(padded_sizes(dtype, sizes)) == expected


def test_a_convolution_in_nchw_fits_and_is_told_of_channels_last() -> None:
    channels = (Dimension("input channels", 64), Dimension("output channels", 128))
    assert "channels_last" in on_gpu(*A100, "fp16", channels, "NCHW").reason
    assert "channels_last" not in on_gpu(*A100, "fp16", channels).reason


@pytest.mark.parametrize(
    ("flags", "dtype", "fit"),
    [
        (("AVX-512F", "AVX512-BF16"), "bf16", Fit.ELIGIBLE),  # Zen 4, Cooper Lake
        (("AVX-512F", "AVX512-BF16"), "fp16", Fit.NOT),
        (("AVX-512F", "AVX512-BF16", "AVX512-FP16", "AMX-BF16"), "fp16", Fit.ELIGIBLE),
        (("AVX2", "F16C"), "fp16", Fit.NOT),  # F16C converts and does not multiply
        (("AVX2", "F16C"), "bf16", Fit.NOT),
        (None, "bf16", Fit.UNKNOWN),
        (("AVX512-BF16",), "fp32", Fit.NOT),
    ],
)
def test_cpus(flags: tuple[str, ...] | None, dtype: str, fit: Fit) -> None:
    assert on_cpu(flags, dtype).fit is fit


def test_only_instructions_of_the_same_family_are_missed() -> None:
    x86 = "This CPU multiplies no fp16: it has neither AMX-FP16 nor AVX512-FP16."
    assert on_cpu(("AVX2", "F16C"), "fp16").reason == x86
    assert on_cpu(("FPHP", "SVE"), "bf16").reason == "This CPU multiplies no bf16: it has no BF16."


def test_the_fastest_instruction_is_named() -> None:
    assert "AMX-BF16" in on_cpu(("AVX512-BF16", "AMX-BF16"), "bf16").reason
