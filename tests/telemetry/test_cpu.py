"""The CPU's readers, on made-up /proc and /sys trees, and on this machine's own processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import psutil
import pytest

from ampscope.records import Sample
from ampscope.store.samples import COLUMNS, row_of
from ampscope.telemetry.cpu import QUOTA, THERMAL, CpuReader, CpuSensors
from ampscope.telemetry.own_processes import OwnProcesses, descends, process_clock_ns
from ampscope.telemetry.values import KernelFile, SampleValues

MEMINFO = "MemTotal:       24684096 kB\nMemFree:        21528736 kB\nMemAvailable:   23739632 kB\n"
MEMINFO += "".join(
    f"{name}: 7 kB\n" for name in ("Buffers", "Cached", "Shmem", "Active", "Inactive")
)
ON_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up root whose /proc psutil reads as well."""
    put(tmp_path, "proc/stat", "btime 0\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    return tmp_path


def put_process(root: Path, pid: int, parent: int) -> None:
    """proc(5): the name may hold parentheses; the 22nd number is the start in ticks."""
    counters = " ".join(["0"] * 17 + [str(pid)] + ["0"] * 30)
    put(root, f"proc/{pid}/stat", f"{pid} (a ) b) S {parent} {counters}")


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def stat_of(busy: int, idle: int, wait: int = 0, steal: int = 0) -> str:
    """/proc/stat with one line of ten counters a core, all cores of this machine alike."""
    cores = os.cpu_count() or 1
    line = "cpu{} {} 0 0 {} {} 0 0 {} 77 77\n"
    one = [line.format(n, busy, idle, wait, steal) for n in range(cores)]
    whole = line.format(" ", *(cores * n for n in (busy, idle, wait, steal)))
    return "".join([whole, *one, "intr 1 2 3\n"])


def test_values_and_columns_are_those_of_a_sample() -> None:
    names = [field.name for field in fields(Sample)]
    assert list(COLUMNS) == names
    assert list(SampleValues.__annotations__) == names[2:]
    assert Sample(*row_of("cpu", 1.0, {"busy_percent": 3.0})) == Sample("cpu", 1.0, 3.0)


def test_busy_is_neither_idle_nor_waiting_and_counts_stolen_time(proc: Path) -> None:
    put(proc, "proc/stat", stat_of(busy=100, idle=1000, wait=50, steal=7))
    put(proc, "proc/meminfo", MEMINFO)
    reader = CpuReader(0, proc)
    first = reader.read(0.0)
    assert "busy_percent" not in first  # a share of no time
    assert first["memory_used_bytes"] == (24684096 - 23739632) * 1024
    # 20 busy, 60 idle, 10 waiting, 10 stolen: 30 of 100
    put(proc, "proc/stat", stat_of(busy=120, idle=1060, wait=60, steal=17))
    assert reader.read(1.0)["busy_percent"] == pytest.approx(30.0)
    assert "busy_percent" not in reader.read(1.0)  # no tick has passed
    reader.close()


def test_a_machine_without_these_files_is_read_all_the_same(proc: Path) -> None:
    reader = CpuReader(os.getpid(), proc)
    for now in (0.0, 0.1):
        found = reader.read(now)
        known = {name for name, value in found.items() if value not in (None, "")}
        assert known <= {"own_percent"}
    reader.close()


def test_own_share_is_of_all_usable_cores(tmp_path: Path) -> None:
    """A process that used 0.5 s in 1 s took half of one core."""
    clock = {os.getppid(): 0}
    reader = CpuReader(os.getppid(), tmp_path, clock.get)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    reader.read(10.0)
    clock[os.getppid()] = 500_000_000
    assert reader.read(11.0)["own_percent"] == pytest.approx(50.0 / (cores or 1))
    clock.clear()  # it has ended
    assert "own_percent" not in reader.read(12.0)
    reader.close()


@ON_LINUX
def test_the_clock_of_a_process_is_what_it_used() -> None:
    """Against the kernel's own account of this process, which getrusage gives."""
    sum(range(2_000_000))
    mine = process_clock_ns(os.getpid())
    assert mine is not None
    assert mine / 1e9 == pytest.approx(time.process_time(), abs=0.05)
    assert process_clock_ns(2**22 + 1) is None  # beyond the largest pid


@ON_LINUX
def test_descendants_count_and_the_reader_does_not(proc: Path) -> None:
    """11 is the run; 12 its child; 13 the child's; 14 a stranger; and this process, 11's child."""
    mine = os.getpid()
    for pid, parent in ((11, 1), (12, 11), (13, 12), (14, 1), (mine, 11)):
        put_process(proc, pid, parent)
    clock = dict.fromkeys((11, 12, 13, 14, mine), 0)
    own = OwnProcesses(11, clock.get)
    assert own.used_ns(0.0) == 0
    clock.update({11: 1, 12: 20, 13: 300, 14: 4000, mine: 50000})
    assert own.used_ns(0.1) == 321
    assert [descends(pid, 12) for pid in (11, 12, 13, 14, 15)] == [False, True, True, False, False]


@ON_LINUX
def test_a_process_that_comes_later_counts_from_then_on(proc: Path) -> None:
    put_process(proc, 11, 1)
    clock = {11: 0, 12: 7_000}
    own = OwnProcesses(11, clock.get)
    own.used_ns(0.0)
    put_process(proc, 12, 11)
    assert own.used_ns(0.5) == 0  # looked for once a second
    assert own.used_ns(100.0) == 0  # found; what it used before is not this reading's
    clock[12] += 30
    assert own.used_ns(100.1) == 30


def test_sensors(tmp_path: Path) -> None:
    for core, kilohertz in ((0, 3_000_000), (1, 2_000_000), (2, 9_000_000)):
        path = f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq"
        put(tmp_path, path, f"{kilohertz}\n")
    put(tmp_path, "sys/class/hwmon/hwmon0/name", "nvme\n")
    put(tmp_path, "sys/class/hwmon/hwmon0/temp1_input", "90000\n")
    put(tmp_path, "sys/class/hwmon/hwmon1/name", "coretemp\n")
    put(tmp_path, "sys/class/hwmon/hwmon1/temp1_input", "61000\n")
    sensors = CpuSensors(os.getpid(), frozenset({0, 1}), tmp_path)
    found = sensors.read(0.0)
    assert found["clock_mhz"] == 2500.0  # of the cores that the run may use
    assert found["temperature_c"] == 61.0  # the disk's is not the CPU's
    assert found["clock_reasons"] == ""
    assert "energy_j" not in found
    sensors.close()


def test_frequency_from_cpuinfo(tmp_path: Path) -> None:
    text = "processor : 0\ncpu MHz\t\t: 2596.128\n\nprocessor : 1\ncpu MHz\t\t: 2600.128\n"
    put(tmp_path, "proc/cpuinfo", text)
    sensors = CpuSensors(os.getpid(), frozenset({0}), tmp_path)
    assert sensors.read(0.0)["clock_mhz"] == pytest.approx(2598.128)
    sensors.close()


def test_energy_goes_on_where_its_counter_begins_anew(tmp_path: Path) -> None:
    for package in (0, 1):
        folder = f"sys/class/powercap/intel-rapl:{package}"
        put(tmp_path, f"{folder}/name", f"package-{package}\n")
        put(tmp_path, f"{folder}/max_energy_range_uj", "10000000\n")
        put(tmp_path, f"{folder}/energy_uj", "9000000\n")
    put(tmp_path, "sys/class/powercap/intel-rapl:0:0/name", "core\n")  # a part of package 0
    put(tmp_path, "sys/class/powercap/intel-rapl:0:0/energy_uj", "500\n")
    reader = CpuReader(0, tmp_path)
    assert reader.read(0.0)["energy_j"] == 18.0
    put(tmp_path, "sys/class/powercap/intel-rapl:1/energy_uj", "1000000\n")  # 2 J later
    found = reader.read(0.5)
    assert found["energy_j"] == 20.0
    assert found["power_w"] == 4.0
    reader.close()


def test_what_holds_a_cpu_back(tmp_path: Path) -> None:
    heat = "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count"
    put(tmp_path, heat, "3\n")
    put(tmp_path, f"proc/{os.getpid()}/cgroup", "0::/docker/abc\n")
    quota = "sys/fs/cgroup/docker/abc/cpu.stat"
    put(tmp_path, quota, "usage_usec 5\nnr_periods 9\nnr_throttled 4\nthrottled_usec 8\n")
    sensors = CpuSensors(os.getpid(), frozenset({0}), tmp_path)
    assert sensors.read(0.0)["clock_reasons"] == ""  # counts of before
    put(tmp_path, heat, "5\n")
    assert sensors.read(0.5)["clock_reasons"] == ""  # once a second
    assert sensors.read(1.0)["clock_reasons"] == THERMAL
    put(tmp_path, quota, "usage_usec 5\nnr_periods 9\nnr_throttled 6\nthrottled_usec 8\n")
    assert sensors.read(2.0)["clock_reasons"] == QUOTA
    assert sensors.read(3.0)["clock_reasons"] == ""
    sensors.close()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("MemTotal: 5 kB\n", 5),
        ("A: 1\nMemTotal: 6 kB\nB: 2\n", 6),
        ("XMemTotal: 7 kB\n", None),
        ("MemTotal: 8", 8),
        ("MemTotal:\n", None),
        ("", None),
    ],
)
def test_a_field_of_a_kernel_file(tmp_path: Path, text: str, number: int | None) -> None:
    put(tmp_path, "meminfo", text)
    file = KernelFile(tmp_path / "meminfo")
    assert file.field(b"MemTotal:") == number
    file.close()
    assert file.read() == b""


@ON_LINUX
def test_a_busy_process_is_seen_as_one_core() -> None:
    """A real process that does nothing but count, for as long as its clock has run 0.4 s."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        reader = CpuReader(process.pid)
        begun = time.monotonic()
        reader.read(begun)
        before = process_clock_ns(process.pid) or 0
        while (process_clock_ns(process.pid) or 0) - before < 4e8:
            time.sleep(0.02)
        now = time.monotonic()
        used_s = ((process_clock_ns(process.pid) or 0) - before) / 1e9
        found = reader.read(now)
        cores = len(os.sched_getaffinity(process.pid))
        expected = 100 * used_s / (now - begun) / cores
        assert found["own_percent"] == pytest.approx(expected, rel=0.1)
        assert found["busy_percent"] >= 0.5 * expected
        assert found["own_memory_bytes"]
        reader.close()
    finally:
        process.kill()
        process.wait()
