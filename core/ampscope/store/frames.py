"""Packing of histogram frames: many rows of RAW_LEN counts into one small blob and back.

Layout, little endian, after one format byte: zlib of ::

    u32 rows · u32 module[rows] · u8 dtype[rows] · u16 occupied[rows]
    u16 column[sum(occupied)] · count[sum(occupied)], each byte plane apart

Only occupied bins are kept. Columns are stored as gaps within a row and counts as byte planes
(all low bytes, then all second bytes …): both make runs of equal bytes, which deflate well.
The count's width (1, 2, 4 or 8 bytes) is the format byte.

Also here: frames of a run of any length in bounded space (:class:`FrameThinning`).
"""

from __future__ import annotations

import bisect
import heapq
import sqlite3
import zlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ampscope.errors import StoreError
from ampscope.numerics.histogram import NAN, NEG_INF, POS_INF, RAW_LEN, Raw, summed
from ampscope.records import Frame, Role
from ampscope.store.pyramid import BAD

# Codes are part of the stored format: append, never reorder.
DTYPE_CODES = (
    "?", "fp64", "fp32", "bf16", "fp16", "e4m3", "e5m2", "complex64", "complex128",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32",
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPE_CODES)}
MAX_ROWS = 100_000  # of one frame: modules times dtypes; unpacked they take 227 MB
MAX_BODY = 128 * 2**20  # bytes: each of these rows with 130 occupied bins
ZLIB_LEVEL = 1  # level 6 saves 4 % of space for three times the time on recorded GPT frames


def pack(modules: tuple[int, ...], dtypes: tuple[str, ...], rows: Raw) -> bytes:
    """Blob of ``rows`` [n, RAW_LEN] of non-negative counts."""
    which, column = np.nonzero(rows)
    counts = rows[which, column].astype("<u8")
    occupied = np.bincount(which, minlength=len(modules)).astype("<u2")
    gaps = np.diff(column, prepend=0)
    first = np.diff(which, prepend=-1) > 0  # a row's first gap is its first column
    gaps[first] = column[first]
    largest = int(counts.max()) if counts.size else 0
    width = next(w for w in (1, 2, 4, 8) if largest < 1 << (8 * w))
    planes = counts.view(np.uint8).reshape(-1, 8)[:, :width].T
    codes = [_CODES.get(dtype, 0) for dtype in dtypes]
    body = b"".join(
        (
            np.array([len(modules)], "<u4").tobytes(),
            np.array(modules, "<u4").tobytes(),
            np.array(codes, np.uint8).tobytes(),
            occupied.tobytes(),
            _planes16(gaps),
            np.ascontiguousarray(planes).tobytes(),
        )
    )
    return bytes([width]) + zlib.compress(body, ZLIB_LEVEL)


def unpack(blob: bytes) -> tuple[tuple[int, ...], tuple[str, ...], Raw]:
    """Inverse of :func:`pack`. Raises StoreError for a blob that is not one."""
    try:
        width, body, count = _opened(blob)
        modules = np.frombuffer(body, "<u4", count, 4)
        codes = np.frombuffer(body, np.uint8, count, 4 + 4 * count)
        occupied = np.frombuffer(body, "<u2", count, 4 + 5 * count).astype(np.int64)
        cells, at = int(occupied.sum()), 4 + 7 * count
        low = np.frombuffer(body, np.uint8, cells, at).astype(np.int64)
        gaps = low + (np.frombuffer(body, np.uint8, cells, at + cells).astype(np.int64) << 8)
        planes = np.frombuffer(body, np.uint8, cells * width, at + 2 * cells)
        values = np.zeros((cells, 8), np.uint8)
        values[:, :width] = planes.reshape(width, cells).T
        which = np.repeat(np.arange(count), occupied)
        running = np.concatenate(([0], np.cumsum(gaps)))
        base = running[np.cumsum(occupied) - occupied]  # where the row before it ended
        rows = np.zeros((count, RAW_LEN), np.int64)
        rows[which, running[1:] - base[which]] = values.view("<u8").ravel().astype(np.int64)
        dtypes = tuple(DTYPE_CODES[code] for code in codes.tolist())
    except (IndexError, OverflowError, ValueError, zlib.error) as error:
        raise StoreError(f"A stored histogram is damaged ({error}); delete this run.") from error
    return tuple(modules.tolist()), dtypes, rows


def unpack_module(blob: bytes, module: int) -> Raw | None:
    """Sum of one module's rows, None when it has none: a quarter of the time of :func:`unpack`,
    for a series over many frames. Raises StoreError for a blob that is not one."""
    try:
        width, body, count = _opened(blob)
        hits = np.flatnonzero(np.frombuffer(body, "<u4", count, 4) == module).tolist()
        ends = np.cumsum(np.frombuffer(body, "<u2", count, 4 + 5 * count), dtype=np.int64)
        cells, at = int(ends[-1]) if count else 0, 4 + 7 * count
        out = np.zeros(RAW_LEN, np.int64)
        for hit in hits:
            start, end = int(ends[hit - 1]) if hit else 0, int(ends[hit])
            planes = [
                np.frombuffer(body, np.uint8, end - start, at + plane * cells + start)
                for plane in range(2 + width)
            ]
            gaps = planes[0].astype(np.int64) + (planes[1].astype(np.int64) << 8)
            values = sum(p.astype(np.int64) << (8 * i) for i, p in enumerate(planes[2:]))
            out[np.cumsum(gaps)] += values
    except (IndexError, OverflowError, ValueError, zlib.error) as error:
        raise StoreError(f"A stored histogram is damaged ({error}); delete this run.") from error
    return out if hits else None


def _opened(blob: bytes) -> tuple[int, bytes, int]:
    """Width of the counts, the body and its number of rows. Raises ValueError for a small blob that
    would be unpacked to much more than any frame of a model holds."""
    inflating = zlib.decompressobj()
    body = inflating.decompress(blob[1:], MAX_BODY)
    if inflating.unconsumed_tail or not inflating.eof:
        raise ValueError("it is cut off, or beyond bounds")
    count = int(np.frombuffer(body, "<u4", 1)[0])
    if count > MAX_ROWS or blob[0] not in (1, 2, 4, 8):
        raise ValueError(f"{count:,} rows are beyond bounds")
    return blob[0], body, count


def _planes16(values: NDArray[np.int64]) -> bytes:
    """Low bytes, then high bytes."""
    low, high = (values & 0xFF).astype(np.uint8), (values >> 8).astype(np.uint8)
    return bytes(low.tobytes() + high.tobytes())


# Frames of a run of any length in bounded space: older neighbours are added up, bad ones never.
#
# A role keeps its newest 256 frames as they are and about 256 older ones, each of which adds up so
# many neighbours that its share of the run's age is about the same: resolution halves with age
# (docs/decisions/0007). Frames are never added up across a bad step, a change of scale, or a frame
# that holds NaN or Inf, and such a frame is never touched. Each new frame costs one addition,
# chosen from the frames before it alone: ranks that record alike thin alike, whenever each of them
# flushes.


NEWEST = 256  # frames per role that stay as they were recorded
KEPT = 512  # frames per role at which adding up begins
_NONFINITE = [NAN, POS_INF, NEG_INF]
_BAD_BETWEEN = (
    "SELECT EXISTS (SELECT 1 FROM step INDEXED BY step_bad"
    f" WHERE run=? AND {BAD} AND step BETWEEN ? AND ?)"
)


@dataclass(slots=True)
class Entry:
    """What is remembered of a stored frame that may still be added to a neighbour."""

    step: int
    last_step: int
    scale: float
    number: int  # how many frames its role had when it (its newest part) came
    weight: int = 1  # recorded frames in it
    apart: bool = False  # holds NaN or Inf
    ends: bool = False  # may not be added to the one after it

    def may_join(self, after: Entry) -> bool:
        """As far as is known without the steps."""
        return not (self.ends or self.apart or after.apart or self.scale != after.scale)


class FrameThinning:
    """Of one run. Remembers some 512 entries a role; isolated frames are forgotten."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._entries: dict[Role, list[Entry]] = {}
        self._arrived: dict[Role, list[Entry]] = {}  # since the last flush
        self._numbers: dict[Role, int] = {}

    def admit(self, frame: Frame) -> bool:
        """Remember a frame that is about to be stored. False when its step is part of a sum
        already: written again 256 frames later, it would count twice."""
        entries = self._entries.setdefault(frame.role, [])
        at = bisect.bisect_right(entries, frame.step, key=_step) - 1
        apart = bool(frame.rows[:, _NONFINITE].any())
        if at >= 0 and entries[at].weight > 1 and entries[at].last_step >= frame.step:
            return apart and entries[at].step != frame.step
        number = self._numbers[frame.role] = self._numbers.get(frame.role, 0) + 1
        last = frame.step if frame.last_step is None else frame.last_step
        entry = Entry(frame.step, last, frame.scale, number, apart=apart)
        self._arrived.setdefault(frame.role, []).append(entry)
        return True

    def forget(self) -> None:
        """After a transaction that failed: what is stored now stays as it is."""
        self._entries.clear()
        self._arrived.clear()

    def thin(self, connection: sqlite3.Connection) -> None:
        """Take in the frames that are stored now, each at the price of one addition, in the open
        transaction."""
        for role, arrived in self._arrived.items():
            entries = self._entries[role]
            for entry in arrived:
                _take_in(entries, entry)
                if len(entries) > KEPT:
                    self._forget_isolated(entries)
                    self._add_up(connection, role, entries, entry.number)
        self._arrived.clear()

    def _forget_isolated(self, entries: list[Entry]) -> None:
        """Those that can join neither neighbour any more."""
        old = len(entries) - NEWEST
        for entry, after in pairwise(entries[: old + 1]):
            entry.ends = not entry.may_join(after)
        alone = [e.ends and (at == 0 or entries[at - 1].ends) for at, e in enumerate(entries[:old])]
        entries[:old] = [e for e, is_alone in zip(entries, alone, strict=False) if not is_alone]

    def _add_up(
        self, connection: sqlite3.Connection, role: Role, entries: list[Entry], newest: int
    ) -> None:
        """The pair whose sum is the shortest for its age, if any may be added up."""
        old = len(entries) - NEWEST
        pairs = [
            ((a.weight + b.weight) / (newest - b.number + 1), at)
            for at, (a, b) in enumerate(pairwise(entries[:old]))
            if not a.ends
        ]
        heapq.heapify(pairs)
        while pairs:
            _, at = heapq.heappop(pairs)
            a, b = entries[at : at + 2]
            if self._is_bad_between(connection, a, b):
                a.ends = True
            elif self._join(connection, role, a, b):
                del entries[at + 1]
                return

    def _is_bad_between(self, connection: sqlite3.Connection, a: Entry, b: Entry) -> bool:
        found = connection.execute(_BAD_BETWEEN, (self._run_id, a.step, b.last_step)).fetchone()
        return bool(found[0])

    def _join(self, connection: sqlite3.Connection, role: Role, a: Entry, b: Entry) -> bool:
        """Write both as one frame in the place of the first."""
        key = (self._run_id, role)
        sql = "SELECT blob FROM frame WHERE run=? AND role=? AND step=?"
        rows = [connection.execute(sql, (*key, e.step)).fetchone() for e in (a, b)]
        if None in rows:  # another program has deleted it
            a.ends = True
            return False
        blob = pack(*summed([unpack(row[0]) for row in rows]))
        connection.execute(
            "UPDATE frame SET blob=?, last_step=? WHERE run=? AND role=? AND step=?",
            (blob, b.last_step, *key, a.step),
        )
        connection.execute("DELETE FROM frame WHERE run=? AND role=? AND step=?", (*key, b.step))
        a.last_step, a.number, a.ends = b.last_step, b.number, b.ends
        a.weight += b.weight
        return True


def _take_in(entries: list[Entry], entry: Entry) -> None:
    """In the order of steps. One that comes so late that its neighbours may have been forgotten
    stays alone."""
    at = bisect.bisect_left(entries, entry.step, key=_step)
    if at < len(entries) and entries[at].step == entry.step:
        if entries[at].weight == 1:  # written again; else it was added up in this very flush
            entry.number = entries[at].number
            entries[at] = entry
    elif len(entries) < NEWEST or entry.step > entries[-NEWEST].step:
        entries.insert(at, entry)


def _step(entry: Entry) -> int:
    return entry.step
