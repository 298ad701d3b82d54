"""The vendor's figures against arithmetic: units a chip has, times what one does a clock, times its
boost clock. The three come from other documents than the figures themselves."""

from __future__ import annotations

import pytest

from ampscope.analysis.ceilings import table, vendor_figures

# Device -> (SMs, boost clock in GHz, operations a clock and SM by dtype). SMs and clocks: NVIDIA's
# architecture whitepapers (Volta, Turing, Ampere GA100 and GA102, Ada, Hopper); operations: "dense
# FMA operations per clock and SM" of their Tensor Core tables, an FMA counted as two. The clock of
# H100's Tensor Cores is 1.83 GHz (SXM5) and 1.62 GHz (PCIe), by the Hopper whitepaper's footnote.
CHIPS: dict[str, tuple[int, float, dict[str, int]]] = {
    "Tesla V100-SXM2-16GB": (80, 1.53, {"fp64": 64, "fp32": 128, "fp16": 1024}),
    "Tesla V100-PCIE-32GB": (80, 1.38, {"fp64": 64, "fp32": 128, "fp16": 1024}),
    "Tesla V100S-PCIE-32GB": (80, 1.597, {"fp64": 64, "fp32": 128, "fp16": 1024}),
    "Tesla T4": (40, 1.59, {"fp32": 128, "fp16": 1024, "int8": 2048}),
    "NVIDIA A10": (
        72,
        1.695,
        {"fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "int8": 2048},
    ),
    "NVIDIA A40": (84, 1.74, {"fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "int8": 2048}),
    "NVIDIA A100-SXM4-40GB": (
        108,
        1.41,
        {"fp64": 128, "fp32": 128, "tf32": 1024, "bf16": 2048, "fp16": 2048, "int8": 4096},
    ),
    "NVIDIA RTX A6000": (
        84,
        1.80,
        {"fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "int8": 2048},
    ),
    "NVIDIA GeForce RTX 3090": (
        82,
        1.695,
        {"fp32": 256, "tf32": 256, "bf16": 512, "fp16": 512, "int8": 2048},
    ),
    "NVIDIA GeForce RTX 4090": (
        128,
        2.52,
        {"fp32": 256, "tf32": 256, "bf16": 512, "fp16": 512, "e4m3": 1024, "int8": 2048},
    ),
    "NVIDIA RTX 6000 Ada Generation": (142, 2.505, {"fp32": 256, "e4m3": 2048}),
    "NVIDIA L4": (
        58,
        2.04,
        {"fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "e4m3": 2048, "int8": 2048},
    ),
    "NVIDIA L40": (
        142,
        2.49,
        {"fp32": 256, "tf32": 256, "bf16": 512, "fp16": 512, "e4m3": 1024, "int8": 1024},
    ),
    "NVIDIA L40S": (
        142,
        2.52,
        {"fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "e4m3": 2048, "int8": 2048},
    ),
    "NVIDIA H100 80GB HBM3": (
        132,
        1.83,
        {"tf32": 2048, "bf16": 4096, "fp16": 4096, "e4m3": 8192, "int8": 8192},
    ),
    "NVIDIA H100 PCIe": (
        114,
        1.62,
        {"tf32": 2048, "bf16": 4096, "fp16": 4096, "e4m3": 8192, "int8": 8192},
    ),
    # Whitepapers: Turing, GA102, Ada, RTX Blackwell (sums in fp32 at half the rate on GeForce).
    "NVIDIA GeForce RTX 2080 Ti": (68, 1.545, {"fp32": 128, "fp16": 512, "int8": 2048}),
    "NVIDIA GeForce RTX 3080": (
        68,
        1.71,
        {"fp32": 256, "tf32": 256, "bf16": 512, "fp16": 512, "int8": 2048},
    ),
    "NVIDIA GeForce RTX 4080": (
        76,
        2.505,
        {"fp32": 256, "tf32": 256, "bf16": 512, "fp16": 512, "e4m3": 1024, "int8": 2048},
    ),
    "NVIDIA GeForce RTX 5080": (
        84,
        2.617,
        {"fp32": 256, "tf32": 256, "bf16": 512, "fp16": 512, "e4m3": 1024, "int8": 2048},
    ),
    "NVIDIA GeForce RTX 5090": (
        170,
        2.407,
        {"fp32": 256, "tf32": 256, "bf16": 512, "fp16": 512, "e4m3": 1024, "int8": 2048},
    ),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (188, 2.617, {"fp32": 256}),
    "NVIDIA A30": (
        56,
        1.44,
        {"fp64": 128, "fp32": 128, "tf32": 1024, "bf16": 2048, "fp16": 2048, "int8": 4096},
    ),
    "NVIDIA A10G": (80, 1.71, {"tf32": 256, "bf16": 512, "fp16": 512, "int8": 1024}),
    # AMD CDNA 3 whitepaper: operations a clock and compute unit of the Matrix Cores.
    "AMD Instinct MI300X": (
        304,
        2.1,
        {"fp64": 256, "fp32": 256, "tf32": 1024, "bf16": 2048, "fp16": 2048, "int8": 4096},
    ),
    "AMD Instinct MI325X": (
        304,
        2.1,
        {"fp64": 256, "fp32": 256, "tf32": 1024, "bf16": 2048, "fp16": 2048, "int8": 4096},
    ),
}


@pytest.mark.parametrize("name", CHIPS)
def test_rates_are_units_times_clock(name: str) -> None:
    sms, ghz, operations = CHIPS[name]
    figures = vendor_figures(name)
    assert figures is not None
    for dtype, per_clock in operations.items():
        computed = sms * per_clock * ghz * 1e9
        assert figures.flops_s[dtype] == pytest.approx(computed, rel=0.035), dtype


@pytest.mark.parametrize(
    ("name", "bus_bits", "gbit_s"),
    [
        ("NVIDIA A100-SXM4-80GB", 5120, 3.186),
        ("NVIDIA A100-PCIE-40GB", 5120, 2.43),
        ("NVIDIA GeForce RTX 4090", 384, 21.0),
        ("NVIDIA GeForce RTX 3090", 384, 19.5),
        ("NVIDIA L4", 192, 12.5),
        ("NVIDIA A40", 384, 14.5),
        ("NVIDIA H100 80GB HBM3", 5120, 5.23),
        ("NVIDIA GeForce RTX 2080 Ti", 352, 14.0),
        ("NVIDIA GeForce RTX 3080", 320, 19.0),
        ("NVIDIA GeForce RTX 4080", 256, 22.4),
        ("NVIDIA GeForce RTX 5080", 256, 30.0),
        ("NVIDIA GeForce RTX 5090", 512, 28.0),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 512, 25.0),
        ("NVIDIA A30", 3072, 2.43),
        ("AMD Instinct MI300X", 8192, 5.2),
    ],
)
def test_bandwidth_is_bus_width_times_pin_rate(name: str, bus_bits: int, gbit_s: float) -> None:
    figures = vendor_figures(name)
    assert figures is not None
    assert figures.bytes_s == pytest.approx(bus_bits * gbit_s * 1e9 / 8, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100X",  # another product than the A100
        "NVIDIA L20",  # no document of NVIDIA's, and none that was found with its source
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",  # a slice of the chip
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA Future",
        "AMD EPYC, 2 cores",
        "",
    ],
)
def test_what_is_not_in_the_table_is_unknown(name: str) -> None:
    assert vendor_figures(name) is None


def test_every_row_has_its_source_and_a_name_of_its_own() -> None:
    names = [name for row in table() for name in row.names]
    assert len(names) == len(set(names))
    for row in table():
        assert "NVIDIA" in row.source or "AMD" in row.source
        assert "https://" in row.source
        assert row.flops_s
        assert all(rate > 0 for rate in row.flops_s.values())


def test_a_name_with_and_without_the_brand_is_the_same() -> None:
    assert vendor_figures("Tesla T4") is vendor_figures("NVIDIA T4") is vendor_figures("T4")
    assert vendor_figures("NVIDIA Tesla T4") is vendor_figures("T4")
