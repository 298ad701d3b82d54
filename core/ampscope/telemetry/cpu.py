"""The CPU: how busy its cores are, with whose work, memory, and what its sensors say.

Busy is the share of time that is neither idle nor waiting for a disk, of the cores on which the run
may work. Time that a hypervisor gave to other machines counts as busy: it was taken from the run.
Ticks are 10 ms long, so one reading on two cores is exact to 5 %; the mean over seconds is what
says something. The ticks are read from /proc/stat (proc(5)), because psutil numbers the cores that
are online from zero, and a run may be tied to some of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from ampscope.telemetry.own_processes import OwnProcesses, process_clock_ns
from ampscope.telemetry.values import SLOW_EVERY_S, KernelFile, SampleValues

LINE_BYTES = 160  # of one core in /proc/stat: ten counters of up to 15 digits
IDLE, IO_WAIT, STEAL = 3, 4, 7  # places of the counters; those behind are parts of others
MOST_CORES = 16  # so many are asked for their frequency: on some kernels each one is woken for it
SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")  # hwmon names of CPU packages
ZONES = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal")
QUOTA, THERMAL = "CPU quota", "hardware thermal slowdown"
CPUINFO_BYTES = 65536


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
        self._own = OwnProcesses(pid, clock_ns) if pid else None
        self._sensors = CpuSensors(pid or os.getpid(), self._cores, root)
        self._before: tuple[int, int] | None = None  # busy and all ticks
        self._was: tuple[float, float | None] | None = None  # time and energy of the last reading

    def read(self, now: float) -> SampleValues:
        """Shares are since the last reading, so the first has none."""
        found = self._sensors.read(now)
        ticks = self._ticks()
        if ticks is not None and self._before is not None:
            busy, whole = (new - old for new, old in zip(ticks, self._before, strict=True))
            if whole > 0:
                found["busy_percent"] = min(100.0, max(0.0, 100 * busy / whole))
        self._before = ticks or self._before
        with contextlib.suppress(OSError):  # a machine that shows none
            memory = psutil.virtual_memory()
            found["memory_used_bytes"] = memory.total - memory.available
        self._read_rates(found, now)
        return found

    def close(self) -> None:
        """Close the files."""
        self._stat.close()
        self._sensors.close()

    def _read_rates(self, found: SampleValues, now: float) -> None:
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


class CpuSensors:
    """A CPU's frequency, temperature and energy, and what holds it back, where Linux reports them.
    Asked at every reading; it reads what is slow once a second and repeats it in between.

    Sources: the kernel's documentation of cpufreq (scaling_cur_freq, kHz), hwmon and thermal zones
    (thousandths of a degree), powercap (intel-rapl, microjoules, which AMD's fills as well), the
    thermal_throttle counters of x86, and the CPU controller of cgroup v2 (nr_throttled in
    cpu.stat). Virtual machines have few of these, often none.
    """

    def __init__(self, pid: int, cores: frozenset[int], root: Path = Path("/")) -> None:
        cpus = root / "sys/devices/system/cpu"
        some = sorted(cores)[:MOST_CORES]
        self._frequencies = _open(cpus / f"cpu{n}/cpufreq/scaling_cur_freq" for n in some)
        self._cpuinfo = KernelFile(root / "proc/cpuinfo", CPUINFO_BYTES)
        self._temperatures = _open(_thermometers(root))
        self._energy = [_Counter(folder) for folder in _packages(root)]
        throttled = KernelFile(cpus / "cpu0/thermal_throttle/package_throttle_count")
        quota = KernelFile(_control_group(pid, root) / "cpu.stat")
        self._brakes = [(THERMAL, throttled, b""), (QUOTA, quota, b"nr_throttled")]
        self._counts: dict[str, int | None] = {}
        self._slow: SampleValues = {}
        self._next_slow = 0.0

    def read(self, now: float) -> SampleValues:
        """What there is of frequency, temperature, energy and reasons."""
        if now >= self._next_slow:
            self._slow = self._read_slow()
            self._next_slow = now + SLOW_EVERY_S
        found = self._slow.copy()
        energies = [counter.joules() for counter in self._energy]
        known = [joules for joules in energies if joules is not None]
        if known and len(known) == len(energies):
            found["energy_j"] = sum(known)
        return found

    def close(self) -> None:
        """Close the files."""
        for file in (*self._frequencies, *self._temperatures, self._cpuinfo):
            file.close()
        for _, file, _ in self._brakes:
            file.close()
        for counter in self._energy:
            counter.file.close()

    def _read_slow(self) -> SampleValues:
        found: SampleValues = {"clock_reasons": ",".join(self._held_back())}
        frequencies = [kilohertz / 1000 for kilohertz in _numbers(self._frequencies)]
        frequencies = frequencies or self._from_cpuinfo()
        if frequencies:
            found["clock_mhz"] = sum(frequencies) / len(frequencies)
        temperatures = _numbers(self._temperatures)
        if temperatures:
            found["temperature_c"] = max(temperatures) / 1000
        return found

    def _from_cpuinfo(self) -> list[float]:
        """``cpu MHz : 2596.128`` of every core; of a virtual machine its nominal frequency."""
        lines = [part.partition(b"\n")[0] for part in self._cpuinfo.read().split(b"cpu MHz")[1:]]
        words = [line.rpartition(b":")[2].strip() for line in lines]
        return [float(word) for word in words if word.replace(b".", b"", 1).isdigit()]

    def _held_back(self) -> list[str]:
        """Reasons whose counter has grown since the last time."""
        grown = []
        for reason, file, name in self._brakes:
            count = file.field(name) if name else file.number()
            before = self._counts.get(reason)
            self._counts[reason] = count
            if before is not None and count is not None and count > before:
                grown.append(reason)
        return grown


class _Counter:
    """The energy of one package, continued where the kernel's counter starts again at zero."""

    def __init__(self, folder: Path) -> None:
        self.file = KernelFile(folder / "energy_uj")
        limit = _text(folder / "max_energy_range_uj").strip()
        self._range = int(limit) if limit.isdigit() else 0
        self._last: int | None = None
        self._rounds = 0

    def joules(self) -> float | None:
        """None where it may not be read: since 2020 that takes root (CVE-2020-8694)."""
        count = self.file.number()
        if count is None:
            return None
        if self._last is not None and count < self._last:
            self._rounds += 1
        self._last = count
        return (self._rounds * self._range + count) / 1e6


def _open(paths: Iterable[Path]) -> list[KernelFile]:
    files = [KernelFile(path) for path in paths]
    return [file for file in files if file.read()]


def _numbers(files: list[KernelFile]) -> list[int]:
    return [number for file in files if (number := file.number()) is not None]


def _named(folder: Path, pattern: str, file: str, names: tuple[str, ...]) -> list[Path]:
    """Folders whose ``file`` holds one of ``names``."""
    places = sorted(folder.glob(pattern))
    return [place for place in places if _text(place / file).strip().startswith(names)]


def _text(path: Path) -> str:
    """The whole of a file that is read once; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _thermometers(root: Path) -> list[Path]:
    sensors = _named(root / "sys/class/hwmon", "hwmon*", "name", SENSORS)
    if sensors:
        return [folder / "temp1_input" for folder in sensors]
    zones = _named(root / "sys/class/thermal", "thermal_zone*", "type", ZONES)
    return [folder / "temp" for folder in zones]


def _packages(root: Path) -> list[Path]:
    """One folder a CPU package; their parts (core, uncore) are within them."""
    return _named(root / "sys/class/powercap", "intel-rapl:*", "name", ("package",))


def _control_group(pid: int, root: Path) -> Path:
    """The folder of the process's group in cgroup v2 (``0::/path``), whose limit it feels."""
    listed = _text(root / f"proc/{pid}/cgroup").splitlines()
    lines = [line for line in listed if line.startswith("0::")]
    return root / "sys/fs/cgroup" / (lines[0][3:].strip().lstrip("/") if lines else "")
