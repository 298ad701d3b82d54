"""The loop: read every device ten times per second, write once a second, end with the run.

A line ``cuda:0 UUID`` on its standard input has it read that GPU too: which one a script uses shows
while it runs. It ends at any other line and at the end of that input, when the run's process is
gone, and when the run in the store is no longer active. None of these needs another's help. It is a
process of its own (see the package), whose standard output is one sentence, or nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path

from ampscope.errors import StoreError
from ampscope.store.processes import process_start_time
from ampscope.store.samples import Row, SampleRows, row_of, thinned
from ampscope.telemetry.cpu import CpuReader
from ampscope.telemetry.values import DeviceLost, DeviceReader

EVERY_S = 0.1
CHECK_EVERY_S = 1.0  # whether the run's process is still there
# After so many seconds of a run: seconds of a window, and readings kept of it besides extremes.
STAGES = ((1800.0, 60.0, 6), (86400.0, 600.0, 10))
EARLY = (1.0, 0)  # before that, a window is what one transaction holds, and all of it is kept


class Sampler:
    """Reads ``readers`` for one run; :attr:`notes` are sentences on what could not be read."""

    def __init__(self, rows: SampleRows, readers: Iterable[DeviceReader]) -> None:
        self.notes: list[str] = []
        self._store = rows
        self._readers = list(readers)
        self._waiting: dict[str, list[Row]] = {reader.device: [] for reader in self._readers}

    def run(self, control: int, pid: int, pid_started: float | None) -> None:
        """Until one of the three ends. ``control`` is the file number of the input."""
        from ampscope.store.processes import is_alive

        poll = select.poll()
        poll.register(control, select.POLLIN | select.POLLHUP)
        begun = last_write = checked = time.monotonic()
        self._read(begun)
        next_at = begun + EVERY_S
        while self._readers:
            if poll.poll(max(0.0, 1000 * (next_at - time.monotonic()))):
                if not self._follow(os.read(control, select.PIPE_BUF), pid):
                    break
                continue
            now = time.monotonic()
            next_at = max(next_at + EVERY_S, now)  # one that came late, or a sleep, is not made up
            if now - checked >= CHECK_EVERY_S:
                checked = now
                if not is_alive(pid, pid_started):
                    break
            self._read(now)
            if now - last_write >= stage(now - begun)[0]:
                last_write = now
                if not self._write(now - begun):
                    return
        self._write(time.monotonic() - begun)

    def close(self) -> None:
        """Close what the readers hold."""
        for reader in self._readers:
            reader.close()

    def _follow(self, lines: bytes, pid: int) -> bool:
        """Do what the input asks for; False where that is to end."""
        for line in lines.decode().splitlines() or [""]:
            device, _, uuid = line.partition(" ")
            if not device.startswith("cuda"):
                return False
            from ampscope.telemetry.gpu import GpuReader  # most runs are on a CPU

            try:
                self._readers.append(GpuReader(device, uuid, pid))
                self._waiting[device] = []
            except DeviceLost as lost:
                self.notes.append(str(lost))
        return True

    def _read(self, now: float) -> None:
        for reader in tuple(self._readers):
            try:
                values = reader.read(now)
            except DeviceLost as lost:
                self.notes.append(str(lost))
                self._readers.remove(reader)
                with contextlib.suppress(Exception):  # whatever a lost device answers to that
                    reader.close()
            else:
                self._waiting[reader.device].append(row_of(reader.device, time.time(), values))

    def _write(self, age_s: float) -> bool:
        """Write what waits; False when the run has ended."""
        regular = stage(age_s)[1]
        kept = [row for rows in self._waiting.values() for row in thinned(rows, regular)]
        for rows in self._waiting.values():
            rows.clear()
        return self._store.write(kept)


def stage(age_s: float) -> tuple[float, int]:
    """(seconds of readings that are written together, how many of them are kept whatever they say,
    where 0 is all of them) at this age of a run.

    Ten readings per second are 5 MB an hour. A run's first half hour is kept as it was read; after
    that a minute keeps a reading every 10 s, a day later ten minutes keep one every minute, and of
    every such window the extremes of each quantity and whatever held the clocks down. A week is
    then about 60,000 rows. Wherever readings are left out, shares of time are estimates.
    """
    stages = ((window_s, kept) for since, window_s, kept in reversed(STAGES) if age_s >= since)
    return next(stages, EARLY)


def say(notes: Sequence[str], report: int) -> None:
    """To the process that started this one, which may be gone."""
    with contextlib.suppress(OSError):
        os.write(report, " ".join(notes).encode())


def main() -> None:
    """Sample until the run ends; a failure is one sentence, never more."""
    parser = ArgumentParser(prog="python -m ampscope.telemetry.sampler", description=__doc__)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--pid", type=int, required=True, help="the run's process")
    options = parser.parse_args()
    started = process_start_time(options.pid)
    notes: list[str] = []
    gc.freeze()  # what was imported stays; a collection need not look at it
    try:
        with SampleRows(options.store, options.run) as rows:
            sampler = Sampler(rows, [CpuReader(options.pid)])
            sampler.run(sys.stdin.fileno(), options.pid, started)
            notes += sampler.notes
            sampler.close()
    except StoreError as error:
        notes.append(f"The machine's readings end early: {error}")
    say(notes, sys.stdout.fileno())
    os._exit(0)  # all is written: taking Python down would only make the run's end wait


if __name__ == "__main__":
    main()
