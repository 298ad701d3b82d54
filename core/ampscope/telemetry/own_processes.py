"""Processor time and memory of the run's process and those that it started.

The time is that of the process's CPU clock, exact to the nanosecond: what psutil reads counts in
ticks of 10 ms, as much as a whole reading may be of. A process clock's number is made of the pid by
clock_getcpuclockid(3): ``(~pid << 3) | 2`` (include/linux/posix-timers.h).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import psutil

from ampscope.telemetry.values import SLOW_EVERY_S

# Descendants are looked for among all processes, which is kept under 0.5 % of a core: after a look
# that took t seconds the next one waits for 200 t.
REST = 200.0


def process_clock_ns(pid: int) -> int | None:
    """Processor time of all threads of a process; None when it is gone or cannot be asked."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return None


def descends(pid: int, ancestor: int) -> bool:
    """Whether ``pid`` is the process ``ancestor`` or was started, at any remove, by it."""
    try:
        return pid == ancestor or any(p.pid == ancestor for p in psutil.Process(pid).parents())
    except psutil.Error:  # it has ended
        return False


class OwnProcesses:
    """The process ``pid`` with its descendants, the reading process left out."""

    def __init__(self, pid: int, clock_ns: Callable[[int], int | None] = process_clock_ns) -> None:
        self._pid = pid
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.Error):  # it has ended
            self._process = psutil.Process(pid)
        self._clock_ns = clock_ns
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
        """Resident memory of the run's own process."""
        try:
            return int(self._process.memory_info().rss) if self._process else None
        except psutil.Error:
            return None

    def _look(self, now: float) -> None:
        """Find the descendants again."""
        begun = time.perf_counter()
        found = {self._pid}
        with contextlib.suppress(psutil.Error):
            children = self._process.children(recursive=True) if self._process else ()
            found.update(child.pid for child in children if child.pid != os.getpid())
        clocks = {pid: self._seen.get(pid, self._clock_ns(pid)) for pid in found}
        self._seen = {pid: clock for pid, clock in clocks.items() if clock is not None}
        took_s = time.perf_counter() - begun
        self._next_look = now + max(SLOW_EVERY_S, REST * took_s)
