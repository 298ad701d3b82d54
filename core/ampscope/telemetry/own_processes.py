"""Processor time and memory of the run's process and those that it started.

The time is that of the process's CPU clock, exact to the nanosecond: /proc/PID/stat counts in ticks
of 10 ms, as much as a whole reading may be of. A process clock's number is made of the pid by
clock_getcpuclockid(3): ``(~pid << 3) | 2`` (include/linux/posix-timers.h).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ampscope.telemetry.values import SLOW_EVERY_S, KernelFile

# Without the kernel's lists of children all processes are looked at, which is kept under 0.5 % of a
# core: after a look that took t seconds the next one waits for 200 t.
REST = 200.0
MOST_GENERATIONS = 32  # a loop of pids cannot be; a wrong file can


def process_clock_ns(pid: int) -> int | None:
    """Processor time of all threads of a process; None when it is gone or cannot be asked."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return None


def descends(pid: int, ancestor: int, root: Path = Path("/")) -> bool:
    """Whether ``pid`` is the process ``ancestor`` or was started, at any remove, by it."""
    for _ in range(MOST_GENERATIONS):
        if pid == ancestor:
            return True
        try:
            stat = (root / "proc" / str(pid) / "stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])  # proc(5): state and parent follow the name
        if pid <= 1:
            return False
    return False


class OwnProcesses:
    """The process ``pid`` with its descendants, the reading process left out."""

    def __init__(
        self,
        pid: int,
        root: Path = Path("/"),
        clock_ns: Callable[[int], int | None] = process_clock_ns,
    ) -> None:
        self._pid = pid
        self._proc = root / "proc"
        self._clock_ns = clock_ns
        self._statm = KernelFile(self._proc / str(pid) / "statm")
        self._seen: dict[int, int] = {}  # pid -> its clock at the last reading
        self._next_look = 0.0

    def used_ns(self, now: float) -> int | None:
        """Processor time since the last call; of a process that is new, since it was found."""
        if now >= self._next_look:
            self._look(now)
        used, is_there = 0, False
        for pid, before in self._seen.items():
            clock = self._clock_ns(pid)
            if clock is not None:
                used += clock - before
                self._seen[pid] = clock
                is_there = is_there or pid == self._pid
        return used if is_there else None

    def memory_bytes(self) -> int | None:
        """Resident memory of the run's own process (proc(5): the second number, in pages)."""
        words = self._statm.read().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else None

    def close(self) -> None:
        """Close the files."""
        self._statm.close()

    def _look(self, now: float) -> None:
        """Find the descendants again."""
        begun = time.perf_counter()
        found = {self._pid, *(self._descendants() - {os.getpid()})}
        clocks = ((pid, self._seen.get(pid, self._clock_ns(pid))) for pid in sorted(found))
        self._seen = {pid: clock for pid, clock in clocks if clock is not None}
        took_s = time.perf_counter() - begun
        self._next_look = now + max(SLOW_EVERY_S, REST * took_s)

    def _descendants(self) -> set[int]:
        children = self._proc / str(self._pid) / "task" / str(self._pid) / "children"
        return self._listed(self._pid) if children.exists() else self._searched()

    def _listed(self, pid: int) -> set[int]:
        """From the kernel's list of children (CONFIG_PROC_CHILDREN) of the main thread, which is
        where data loaders start theirs."""
        try:
            text = (self._proc / str(pid) / "task" / str(pid) / "children").read_text()
        except OSError:
            return set()
        children = {int(word) for word in text.split()}
        return children.union(*(self._listed(child) for child in children))

    def _searched(self) -> set[int]:
        """From the parents of all processes (proc(5): the second word after the name)."""
        children: dict[int, list[int]] = {}
        try:
            names = os.listdir(self._proc)
        except OSError:  # no /proc: macOS
            return set()
        for name in names:
            if name.isdigit():
                try:
                    stat = (self._proc / name / "stat").read_bytes()
                    children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(
                        int(name)
                    )
                except (OSError, IndexError, ValueError):  # it has ended meanwhile
                    continue
        found: set[int] = set()
        waiting = [self._pid]
        while waiting:
            more = set(children.get(waiting.pop(), ())) - found
            found |= more
            waiting += more
        return found
