"""Fewer rows of telemetry, none of them invented: some at regular distance, and all extremes.

Used where readings of a long run are written, and where they are read for a chart.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.store.sample_rows import QUANTITIES, REASONS, Row


def thinned(rows: Sequence[Row], regular: int) -> list[Row]:
    """Of rows of one device in the order of time: about ``regular`` at equal distance, those of
    the smallest and the largest value of every quantity, and the first of everything that holds the
    clocks down. 0 is all rows."""
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
