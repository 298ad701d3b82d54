"""One reading before it is a row: the fields of records.Sample, without its device and time.

    {"busy_percent": 96.5, "own_percent": 84.0, "memory_used_bytes": 8_589_934_592}

A field that is left out cannot be read here. A TypedDict, because the record's room loads NumPy,
which costs more than an hour of sampling; a test keeps the two alike.
"""

from __future__ import annotations

from typing import Protocol, TypedDict

SLOW_EVERY_S = 1.0  # what changes slowly or is dear to read is read so often


class Values(TypedDict, total=False):
    """See records.Sample for meanings and units."""

    busy_percent: float | None
    own_percent: float | None
    memory_used_bytes: int | None
    own_memory_bytes: int | None
    power_w: float | None
    energy_j: float | None
    temperature_c: float | None
    clock_mhz: float | None
    memory_clock_mhz: float | None
    pcie_rx_bytes_s: float | None
    pcie_tx_bytes_s: float | None
    clock_reasons: str
    other_processes: int | None


class DeviceLost(Exception):  # noqa: N818  # says what happened, as the project's other errors
    """The device answers nothing more; the text is one sentence for a person."""


class DeviceReader(Protocol):
    """Reads one device."""

    device: str  # "cpu", "cuda:0"

    def read(self, now: float) -> Values:
        """One reading at ``now`` (seconds of a clock that only goes forward). Raises DeviceLost."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
