"""One reading before it is a row: the fields of records.Sample, without its device and time.

    {"busy_percent": 96.5, "own_percent": 84.0, "memory_used_bytes": 8_589_934_592}

A field that is left out cannot be read here. A TypedDict, because the record's room loads NumPy,
which costs more than an hour of sampling; a test keeps the two alike.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, TypedDict

SLOW_EVERY_S = 1.0  # how often what changes slowly or is slow to read is read


class SampleValues(TypedDict, total=False):
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

    def read(self, now: float) -> SampleValues:
        """One reading at ``now`` (seconds of a clock that only goes forward). Raises DeviceLost."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


MAX_BYTES = 4096  # more than any of them but /proc/stat and /proc/cpuinfo on a large machine


class KernelFile:
    """A file of /proc or /sys that is read again and again: opened once, read from its beginning.
    One that is absent or gives an error reads as empty."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def read(self) -> bytes:
        """Its beginning now."""
        if self._descriptor < 0:
            return b""
        try:
            return os.pread(self._descriptor, self._max_bytes, 0)
        except OSError:  # a process that has ended, a sensor that is asleep
            return b""

    def number(self) -> int | None:
        """The whole number that it consists of; None where it is not a number."""
        try:
            return int(self.read())
        except ValueError:
            return None

    def field(self, name: bytes) -> int | None:
        """The number behind ``name`` at the beginning of a line (``nr_throttled 4``)."""
        text = self.read()
        place = 0 if text.startswith(name) else text.find(b"\n" + name) + 1
        if not text.startswith(name, place):
            return None
        words = text[place + len(name) : text.find(b"\n", place) % (len(text) + 1)].split()
        return int(words[0]) if words and words[0].isdigit() else None

    def close(self) -> None:
        """Again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
