"""What NVIDIA and AMD print about a GPU: peak rates and memory bandwidth, each row with its source.

    >>> vendor_figures("NVIDIA A100-SXM4-40GB").flops_s["bf16"]
    312000000000000.0
    >>> vendor_figures("NVIDIA A100X") is None
    True

The device's whole name must be in the table: near names are other products (A10 and A10G, RTX
4090 and RTX 4090 D), and the name of a MIG slice ends in its profile. Nothing is derived from
neighbours. The table, with what its figures mean, is vendor_figures.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

FILE = "vendor_figures.toml"


@dataclass(frozen=True, slots=True)
class VendorFigures:
    """One row; a dtype that is not in ``flops_s`` is unknown."""

    names: tuple[str, ...]
    flops_s: Mapping[str, float]  # dtype (a name of formats, "tf32", "int8") -> operations a second
    bytes_s: float  # of the memory
    source: str  # title and address of the document


def vendor_figures(device_name: str) -> VendorFigures | None:
    """The row of a device by the name that torch and NVML give it, or None: unknown."""
    plain = re.sub(r"^(NVIDIA|Tesla)\s+", "", re.sub(r"^NVIDIA\s+", "", device_name.strip()))
    return next((row for row in table() if plain in row.names), None)


@cache
def table() -> tuple[VendorFigures, ...]:
    """All rows, in the order of the file."""
    data = tomllib.loads(resources.files("ampscope.hardware").joinpath(FILE).read_text())
    return tuple(
        VendorFigures(
            names=tuple(row["names"]),
            flops_s={dtype: 1e12 * rate for dtype, rate in row["rates"].items()},
            bytes_s=1e9 * row["memory"],
            source=data["sources"][row["source"]],
        )
        for row in data["gpu"]
    )
