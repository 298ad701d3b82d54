"""The CPU: how busy its cores are, with whose work, and memory.

Busy is the share of time that is neither idle nor waiting for a disk, of the cores on which the run
may work, in /proc/stat (proc(5)). Time that a hypervisor gave to other machines counts as busy: it
was taken from the run. Ticks are 10 ms long, so one reading on two cores is exact to 5 %; the mean
over seconds is what says something.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ampscope.telemetry.cpu_sensors import CpuSensors
from ampscope.telemetry.kernel_files import KernelFile
from ampscope.telemetry.own_processes import OwnProcesses, process_clock_ns
from ampscope.telemetry.values import Values

LINE_BYTES = 160  # of one core in /proc/stat: ten counters of up to 15 digits
IDLE, IO_WAIT, STEAL = 3, 4, 7  # places of the counters; those behind are parts of others


class CpuReader:
    """The CPU on which the process ``pid`` runs; 0 for the machine alone."""

    device = "cpu"

    def __init__(
        self,
        pid: int,
        root: Path = Path("/"),
        clock_ns: Callable[[int], int | None] = process_clock_ns,
    ) -> None:
        everywhere = frozenset(range(os.cpu_count() or 1))
        self._cores = _usable(pid) or everywhere
        self._takes_all = self._cores >= everywhere
        lines = 1 if self._takes_all else 1 + max(self._cores | everywhere)
        self._stat = KernelFile(root / "proc/stat", (1 + lines) * LINE_BYTES)
        self._meminfo = KernelFile(root / "proc/meminfo", 256)  # its first lines
        self._own = OwnProcesses(pid, root, clock_ns) if pid else None
        self._sensors = CpuSensors(pid or os.getpid(), self._cores, root)
        self._before: tuple[int, int] | None = None  # busy and all ticks
        self._was: tuple[float, float | None] | None = None  # time and energy of the last reading

    def read(self, now: float) -> Values:
        """Shares are since the last reading, so the first has none."""
        found = self._sensors.read(now)
        ticks = self._ticks()
        if ticks is not None and self._before is not None:
            busy, whole = (new - old for new, old in zip(ticks, self._before, strict=True))
            if whole > 0:
                found["busy_percent"] = min(100.0, max(0.0, 100 * busy / whole))
        self._before = ticks or self._before
        available, total = (self._meminfo.field(n) for n in (b"MemAvailable:", b"MemTotal:"))
        if available is not None and total is not None:
            found["memory_used_bytes"] = (total - available) * 1024
        self._read_rates(found, now)
        return found

    def close(self) -> None:
        """Close the files."""
        for held in (self._stat, self._meminfo, self._sensors, self._own):
            if held is not None:
                held.close()

    def _read_rates(self, found: Values, now: float) -> None:
        """The run's own share, and power from energy."""
        used_ns = None
        if self._own is not None:
            used_ns = self._own.used_ns(now)
            found["own_memory_bytes"] = self._own.memory_bytes()
        energy_j = found.get("energy_j")
        if self._was is not None and now > self._was[0]:
            seconds = now - self._was[0]
            if used_ns is not None:
                share = used_ns / 1e9 / seconds / len(self._cores)
                found["own_percent"] = min(100.0, 100 * share)
            if energy_j is not None and self._was[1] is not None:
                found["power_w"] = (energy_j - self._was[1]) / seconds
        self._was = (now, energy_j)

    def _ticks(self) -> tuple[int, int] | None:
        """Busy and all ticks since the machine started, of the usable cores."""
        lines = self._stat.read().split(b"\n")
        if not lines[0].startswith(b"cpu "):
            return None
        if self._takes_all:
            return _busy_and_all(lines[0])
        pairs = [
            _busy_and_all(line)
            for line in lines[1:]
            if line.startswith(b"cpu") and int(line[3 : line.index(b" ")]) in self._cores
        ]
        return sum(busy for busy, _ in pairs), sum(whole for _, whole in pairs)


def _busy_and_all(line: bytes) -> tuple[int, int]:
    counters = [int(word) for word in line.split()[1 : STEAL + 2]]
    whole = sum(counters)
    return whole - sum(counters[IDLE : IO_WAIT + 1]), whole


def _usable(pid: int) -> frozenset[int]:
    """Cores on which a process may run; empty where that cannot be asked."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # macOS; the process has ended
        return frozenset()
