"""What a device reads beside a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one device; None is "cannot be read here"."""

    device: str  # "cpu", "cuda:0"
    at: float  # seconds since the epoch
    busy_percent: float | None = None  # of the sample period in which a kernel ran; CPU: all cores
    own_percent: float | None = None  # CPU: of that, the run's own processes
    memory_used_bytes: int | None = None  # by everybody
    own_memory_bytes: int | None = None  # by the run's own process
    power_w: float | None = None
    energy_j: float | None = None  # a counter; differences mean something
    temperature_c: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    pcie_rx_bytes_s: float | None = None  # into the device
    pcie_tx_bytes_s: float | None = None
    clock_reasons: str = ""  # what holds the clocks down, a comma between them
    other_processes: int | None = None  # with memory on the device, beside the run's own
