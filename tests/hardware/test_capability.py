"""Tensor Cores by capability and name, against facts transcribed apart from the table."""

from __future__ import annotations

import pytest

from ampscope.hardware.capability import (
    CAPABILITIES,
    DTYPE_LABELS,
    Presence,
    emulates_bf16,
    parse_capability,
    tensor_cores,
)
from ampscope.numerics.formats import FORMATS

# CUDA Programming Guide 13, section 5.1, the table of Tensor Core input data types, row by row.
# The guide says FP8, FP6, FP4 without the encodings; those are in the PTX ISA (mma: .e4m3, .e5m2,
# .e3m2, .e2m3, .e2m1).
GUIDE = """
7.5  FP16 INT8 INT4
8.0  FP64 TF32 BF16 FP16 INT8 INT4
8.6  TF32 BF16 FP16 INT8 INT4
8.7  TF32 BF16 FP16 INT8 INT4
8.9  TF32 BF16 FP16 FP8 INT8 INT4
9.0  FP64 TF32 BF16 FP16 FP8 INT8
10.0 FP64 TF32 BF16 FP16 FP8 FP6 FP4 INT8
10.3 TF32 BF16 FP16 FP8 FP6 FP4 INT8
11.0 TF32 BF16 FP16 FP8 FP6 FP4 INT8
12.0 TF32 BF16 FP16 FP8 FP6 FP4 INT8
12.1 TF32 BF16 FP16 FP8 FP6 FP4 INT8
"""
ENCODINGS = {"FP8": {"e4m3", "e5m2"}, "FP6": {"e3m2", "e2m3"}, "FP4": {"e2m1"}}


@pytest.mark.parametrize("line", GUIDE.strip().splitlines())
def test_the_table_agrees_with_the_programming_guide(line: str) -> None:
    capability, *names = line.split()
    expected = set().union(*(ENCODINGS.get(name, {name.lower()}) for name in names))
    info = tensor_cores(capability, "NVIDIA RTX something")
    assert info.presence is Presence.PRESENT
    assert set(info.dtypes) == expected
    assert {d for d in DTYPE_LABELS if info.accelerates(d)} == expected


# Generation and dtypes as the architecture's own paper or data sheet states them.
FACTS = [
    ("7.0", "Tesla V100-SXM2-16GB", "Volta", 1, "fp16", "bf16"),  # WP-08608-001
    ("7.2", "Xavier", "Volta (Xavier)", 1, "int8", "bf16"),  # PTX ISA: wmma .s8 from sm_72
    ("7.5", "Tesla T4", "Turing", 2, "int4", "bf16"),  # WP-09183-001
    ("8.0", "NVIDIA A100-SXM4-80GB", "Ampere", 3, "tf32", "e4m3"),  # A100 architecture paper
    ("8.6", "NVIDIA GeForce RTX 3090", "Ampere", 3, "bf16", "fp64"),  # GA102 paper
    ("8.9", "NVIDIA L4", "Ada Lovelace", 4, "e4m3", "fp64"),  # Ada GPU architecture paper
    ("9.0", "NVIDIA H100 80GB HBM3", "Hopper", 4, "e5m2", "e2m1"),  # H100 architecture paper
    ("10.0", "NVIDIA B200", "Blackwell", 5, "e2m1", "int4"),  # Blackwell technical brief
    (
        "12.0",
        "NVIDIA GeForce RTX 5090",
        "Blackwell (RTX)",
        5,
        "e2m1",
        "fp64",
    ),  # RTX Blackwell paper
]


@pytest.mark.parametrize(("capability", "name", "architecture", "generation", "yes", "no"), FACTS)
def test_known_gpus(
    capability: str, name: str, architecture: str, generation: int, yes: str, no: str
) -> None:
    info = tensor_cores(capability, name)
    assert (info.architecture, info.generation) == (architecture, generation)
    assert info.accelerates(yes) is True
    assert info.accelerates(no) is False
    assert info.source


# TU116 and TU117 (TechPowerUp GPU database; NVIDIA lists all of them at 7.5).
WITHOUT = [
    "NVIDIA GeForce GTX 1660 Ti",
    "GeForce GTX 1660 SUPER",
    "NVIDIA GeForce GTX 1650 with Max-Q Design",
    "NVIDIA GeForce GTX 1630",
    "NVIDIA GeForce MX450",
    "NVIDIA GeForce MX550",
    "NVIDIA T400 4GB",
    "NVIDIA T500",
    "NVIDIA T550 Laptop GPU",
    "NVIDIA T600",
    "NVIDIA T1000 8GB",
    "NVIDIA T1200 Laptop GPU",
    "Quadro T1000",
    "Quadro T2000 with Max-Q Design",
    "NVIDIA CMP 30HX",
]
WITH = [
    "Tesla T4",
    "NVIDIA T4",
    "GRID T4-8Q",
    "NVIDIA T4G",
    "Tesla T10",
    "NVIDIA GeForce RTX 2080 Ti",
    "TITAN RTX",
    "Quadro RTX 3000",
]


@pytest.mark.parametrize("name", WITHOUT)
def test_turing_without_tensor_cores(name: str) -> None:
    info = tensor_cores("7.5", name)
    assert (info.presence, info.dtypes, info.generation) == (Presence.ABSENT, (), None)
    assert info.accelerates("fp16") is False
    assert "TU117" in info.note


@pytest.mark.parametrize("name", WITH)
def test_turing_with_tensor_cores(name: str) -> None:
    assert tensor_cores("7.5", name).presence is Presence.PRESENT


@pytest.mark.parametrize("name", ["", "Graphics Device", "NVIDIA CMP 40HX"])
def test_a_turing_chip_that_the_name_does_not_tell_is_unknown(name: str) -> None:
    info = tensor_cores("7.5", name)
    assert info.presence is Presence.UNKNOWN
    assert info.accelerates("fp16") is None


def test_the_name_matters_at_7_5_alone() -> None:
    assert tensor_cores("8.6", "NVIDIA GeForce MX450").presence is Presence.PRESENT
    assert tensor_cores("6.1", "NVIDIA GeForce GTX 1080 Ti").presence is Presence.ABSENT


@pytest.mark.parametrize("capability", [None, "", "nine", "8", "8.8", "13.0"])
def test_what_is_not_in_the_table_is_unknown(capability: str | None) -> None:
    info = tensor_cores(capability, "NVIDIA Something")
    assert info.presence is Presence.UNKNOWN
    assert info.accelerates("fp16") is None
    assert info.note


def test_every_row_has_a_source_and_known_dtypes() -> None:
    assert len({row.capability for row in CAPABILITIES}) == len(CAPABILITIES)
    for row in CAPABILITIES:
        assert row.source
        assert set(row.dtypes) <= set(DTYPE_LABELS)
    floating = {"fp64", "tf32", "bf16", "fp16", "e4m3", "e5m2"}
    assert floating <= set(FORMATS) & set(DTYPE_LABELS)


def test_bf16_is_emulated_where_no_tensor_core_takes_it() -> None:
    """bf16 instructions and Tensor Cores that take it came together, with 8.0."""
    for row in CAPABILITIES:
        asked = row.capability.replace("x", "0")
        assert emulates_bf16(asked) is ("bf16" not in row.dtypes), asked
    assert emulates_bf16("6.1")
    for unknown in (None, "", "AVX2", "13.0"):
        assert not emulates_bf16(unknown)


def test_parse_capability() -> None:
    assert parse_capability("12.1") == (12, 1)
    assert parse_capability("9") is None
