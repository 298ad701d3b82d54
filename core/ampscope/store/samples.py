"""Rows of the table telemetry, written by the process that reads the machine.

A second writer beside the run's own: one transaction per second into the same file (WAL, where the
two wait for each other). It imports no NumPy, because that costs more than what it is used for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ampscope.store import db

Row = tuple[Any, ...]  # in the order of COLUMNS

# The fields of records.Sample, in their order.
COLUMNS = (
    "device", "at", "busy_percent", "own_percent", "memory_used_bytes", "own_memory_bytes",
    "power_w", "energy_j", "temperature_c", "clock_mhz", "memory_clock_mhz", "pcie_rx_bytes_s",
    "pcie_tx_bytes_s", "clock_reasons", "other_processes",
)  # fmt: skip
REASONS = COLUMNS.index("clock_reasons")
QUANTITIES = tuple(n for n, name in enumerate(COLUMNS) if n > 1 and name != "clock_reasons")
_INSERT = (
    f"INSERT OR REPLACE INTO telemetry (run,{','.join(COLUMNS)}) VALUES (?{',?' * len(COLUMNS)})"
)
ON_DISK_EVERY_S = 10.0  # without WAL each transaction waits for the disk, so they are fewer


def row_of(device: str, at: float, values: Mapping[str, object]) -> Row:
    """``values`` are fields of Sample by name; those that are left out are not known."""
    known = {"clock_reasons": "", **values, "device": device, "at": at}
    return tuple(known.get(name) for name in COLUMNS)


class SampleRows:
    """The open store of one run. Raises StoreError."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._waiting: list[Row] = []
        self._connection = db.open_for_writing(path)
        with db.translated(path):
            journal = self._connection.execute("PRAGMA journal_mode").fetchone()[0]
        self._every_s = 0.0 if journal == "wal" else ON_DISK_EVERY_S
        self._written = time.monotonic()

    def write(self, rows: Sequence[Row]) -> bool:
        """In one transaction; False, and nothing written, when the run is no longer active."""
        self._waiting += rows
        if time.monotonic() - self._written < self._every_s:
            return True
        return self.flush()

    def flush(self) -> bool:
        """Write what waits."""
        rows, self._waiting = self._waiting, []
        self._written = time.monotonic()
        with db.translated(self._path), db.transaction(self._connection):
            sql = "SELECT state FROM run WHERE id=?"
            found = self._connection.execute(sql, (self._run_id,)).fetchone()
            if found is None or found[0] not in ("queued", "running"):
                return False
            self._connection.executemany(_INSERT, [(self._run_id, *row) for row in rows])
        return True

    def __enter__(self) -> SampleRows:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self.flush()
        finally:
            self._connection.close()


def of_devices(rows: Sequence[Row], points: int) -> list[Row]:
    """Rows of all devices in the order of time, about ``points`` of each; 0 is all."""
    if points <= 0:
        return list(rows)
    by_device: dict[object, list[Row]] = {}
    for row in rows:
        by_device.setdefault(row[0], []).append(row)
    kept = [row for own in by_device.values() for row in overview(own, points)]
    return sorted(kept, key=lambda row: (row[1], row[0]))


def overview(rows: Sequence[Row], points: int) -> list[Row]:
    """Between half and all of ``points`` rows of one device; all rows where they are no more. Each
    of a number of equal parts keeps its extremes, and as many at regular distance."""
    if len(rows) <= points:
        return list(rows)
    extremes = 2 * len(QUANTITIES)
    parts = max(1, points // (2 * extremes))
    size = -(-len(rows) // parts)
    return [row for n in range(0, len(rows), size) for row in thinned(rows[n : n + size], extremes)]


def thinned(rows: Sequence[Row], regular: int) -> list[Row]:
    """Fewer rows of telemetry, none of them invented, where readings of a long run are written and
    where they are read for a chart. Of rows of one device in the order of time: about ``regular``
    at equal distance, those of the smallest and the largest value of every quantity, and the first
    of everything that holds the clocks down. 0 is all rows."""
    if regular <= 0 or len(rows) <= regular:
        return list(rows)
    kept = set(range(0, len(rows), -(-len(rows) // regular)))
    for quantity in QUANTITIES:
        known = [n for n, row in enumerate(rows) if row[quantity] is not None]
        if known:
            values = [row[quantity] for row in rows]
            kept.add(min(known, key=values.__getitem__))
            kept.add(max(known, key=values.__getitem__))
    reasons = [row[REASONS] for row in rows]
    kept.update(reasons.index(held) for held in set(reasons))
    return [rows[n] for n in sorted(kept)]
