"""Made-up readings for tests: a CPU and a GPU at ten readings per second, each value as asked
for."""

from __future__ import annotations

from dataclasses import replace

from ampscope.records import Sample

BEGIN = 1_700_000_000.0  # exact in binary with tenths as sixteenths: see EVERY_S
EVERY_S = 0.125
GIB = 2**30


def cpu(
    seconds: float, busy: float = 90.0, own: float = 88.0, begin: float = BEGIN
) -> list[Sample]:
    """A CPU that does the same all the time."""
    return [
        Sample(
            "cpu",
            begin + n * EVERY_S,
            busy_percent=busy,
            own_percent=own,
            memory_used_bytes=8 * GIB,
            own_memory_bytes=2 * GIB,
            clock_mhz=2600.0,
        )
        for n in range(int(seconds / EVERY_S) + 1)
    ]


def gpu(seconds: float, begin: float = BEGIN) -> list[Sample]:
    """A GPU that draws 300 W, alone with the run and never held back."""
    return [
        Sample(
            "cuda:0",
            begin + n * EVERY_S,
            busy_percent=95.0,
            memory_used_bytes=12 * GIB,
            own_memory_bytes=11 * GIB,
            power_w=300.0,
            energy_j=5000.0 + 300.0 * n * EVERY_S,
            temperature_c=40.0 + 0.01 * n,
            clock_mhz=1980.0,
            memory_clock_mhz=2619.0,
            pcie_rx_bytes_s=2e9,
            pcie_tx_bytes_s=1e8 * (n % 3),
            other_processes=0,
        )
        for n in range(int(seconds / EVERY_S) + 1)
    ]


def throttled(samples: list[Sample], reason: str, first: int, last: int) -> list[Sample]:
    """With ``reason`` at the readings ``first`` up to ``last``, that one left out."""
    return [
        replace(s, clock_reasons=reason, clock_mhz=1410.0) if first <= n < last else s
        for n, s in enumerate(samples)
    ]
