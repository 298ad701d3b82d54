"""A CPU's frequency, temperature, energy, and what holds it back, where Linux tells.

Sources: the kernel's documentation of cpufreq (scaling_cur_freq, kHz), hwmon and thermal zones
(thousandths of a degree), powercap (intel-rapl, microjoules, which AMD's fills as well), the
thermal_throttle counters of x86, and the CPU controller of cgroup v2 (nr_throttled in cpu.stat).
Virtual machines have few of these, often none.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ampscope.telemetry.kernel_files import KernelFile
from ampscope.telemetry.values import SLOW_EVERY_S, Values

MOST_CORES = 16  # so many are asked for their frequency: on some kernels each one is woken for it
SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")  # hwmon names of CPU packages
ZONES = ("x86_pkg_temp", "cpu-thermal", "cpu_thermal")
QUOTA, THERMAL = "CPU quota", "hardware thermal slowdown"
CPUINFO_BYTES = 65536


class CpuSensors:
    """Asked at every reading; it reads what is slow once a second and repeats it in between."""

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
        self._slow: Values = {}
        self._next_slow = 0.0

    def read(self, now: float) -> Values:
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

    def _read_slow(self) -> Values:
        found: Values = {"clock_reasons": ",".join(self._held_back())}
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
    """The energy of one package, made to go on where the kernel's counter begins anew."""

    def __init__(self, folder: Path) -> None:
        self.file = KernelFile(folder / "energy_uj")
        limit = KernelFile(folder / "max_energy_range_uj")
        self._range = limit.number() or 0
        limit.close()
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
    found = []
    for place in sorted(folder.glob(pattern)):
        name = KernelFile(place / file)
        if name.read().decode(errors="replace").strip().startswith(names):
            found.append(place)
        name.close()
    return found


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
    listed = KernelFile(root / f"proc/{pid}/cgroup")
    text = listed.read().decode(errors="replace")
    listed.close()
    lines = [line for line in text.splitlines() if line.startswith("0::")]
    return root / "sys/fs/cgroup" / (lines[0][3:].strip().lstrip("/") if lines else "")
