"""Which quantities of a device are drawn together, in which unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampscope.records import Sample

Value = Callable[[Sample], float | None]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Panel:
    """What is drawn together: name of a line, its value."""

    title: str
    unit: str
    lines: tuple[tuple[str, Value], ...]
    always: bool = False  # also where it never changed
    top: float | None = None  # of the axis


def _scaled(read: Callable[[Sample], float | None], factor: float) -> Value:
    def value(sample: Sample) -> float | None:
        found = read(sample)
        return None if found is None else found / factor

    return value


def panels_of(device: str) -> tuple[Panel, ...]:
    """In the order in which they are drawn."""
    others = "all" if device == "cpu" else "GPU"
    return (
        Panel(
            "busy",
            "%",
            ((others, lambda s: s.busy_percent), ("the run", lambda s: s.own_percent)),
            always=True,
            top=105,
        ),
        Panel(
            "memory",
            "GiB",
            (
                ("by everybody", _scaled(lambda s: s.memory_used_bytes, GIB)),
                ("the run's process", _scaled(lambda s: s.own_memory_bytes, GIB)),
            ),
            always=True,
        ),
        Panel("power", "W", (("power", lambda s: s.power_w),)),
        Panel("temperature", "°C", (("temperature", lambda s: s.temperature_c),)),
        Panel(
            "clock",
            "MHz",
            (("memory", lambda s: s.memory_clock_mhz), ("cores", lambda s: s.clock_mhz)),
        ),
        Panel(
            "PCIe",
            "GB/s",
            (
                ("into the GPU", _scaled(lambda s: s.pcie_rx_bytes_s, 1e9)),
                ("out of it", _scaled(lambda s: s.pcie_tx_bytes_s, 1e9)),
            ),
        ),
    )
