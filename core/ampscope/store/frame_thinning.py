"""Frames of a run of any length in bounded space: older neighbours are added up, bad ones never.

A role keeps its newest 256 frames as they are and about 256 older ones, each of which adds up so
many neighbours that its share of the run's age is about the same: resolution halves with age
(docs/decisions/0007). Frames are never added up across a bad step, a change of scale, or a frame
that holds NaN or Inf, and such a frame is never touched. Each new frame costs one addition,
chosen from the frames before it alone: ranks that record alike thin alike, whenever each of them
flushes.
"""

from __future__ import annotations

import bisect
import heapq
import sqlite3
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from ampscope.numerics.histogram import NAN, NEG_INF, POS_INF, summed
from ampscope.records import Frame, Role
from ampscope.store.frames import pack, unpack
from ampscope.store.pyramid import BAD

NEWEST = 256  # frames per role that stay as they were recorded
KEPT = 512  # frames per role at which adding up begins
_NONFINITE = [NAN, POS_INF, NEG_INF]
_BAD_BETWEEN = (
    "SELECT EXISTS (SELECT 1 FROM step INDEXED BY step_bad"
    f" WHERE run=? AND {BAD} AND step BETWEEN ? AND ?)"
)
_step = attrgetter("step")


class FrameThinning:
    """Of one run. Remembers some 512 entries a role; isolated frames are forgotten."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._entries: dict[Role, list[StoredFrame]] = {}
        self._arrived: dict[Role, list[StoredFrame]] = {}  # since the last flush
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
        entry = StoredFrame(frame.step, last, frame.scale, number, apart=apart)
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

    def _forget_isolated(self, entries: list[StoredFrame]) -> None:
        """Those that can join neither neighbour any more."""
        old = len(entries) - NEWEST
        for entry, after in pairwise(entries[: old + 1]):
            entry.ends = not entry.may_join(after)
        alone = [e.ends and (at == 0 or entries[at - 1].ends) for at, e in enumerate(entries[:old])]
        entries[:old] = [e for e, is_alone in zip(entries, alone, strict=False) if not is_alone]

    def _add_up(
        self, connection: sqlite3.Connection, role: Role, entries: list[StoredFrame], newest: int
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

    def _is_bad_between(
        self, connection: sqlite3.Connection, a: StoredFrame, b: StoredFrame
    ) -> bool:
        found = connection.execute(_BAD_BETWEEN, (self._run_id, a.step, b.last_step)).fetchone()
        return bool(found[0])

    def _join(
        self, connection: sqlite3.Connection, role: Role, a: StoredFrame, b: StoredFrame
    ) -> bool:
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


def _take_in(entries: list[StoredFrame], entry: StoredFrame) -> None:
    """In the order of steps. One that comes so late that its neighbours may have been forgotten
    stays alone."""
    at = bisect.bisect_left(entries, entry.step, key=_step)
    if at < len(entries) and entries[at].step == entry.step:
        if entries[at].weight == 1:  # written again; else it was added up in this very flush
            entry.number = entries[at].number
            entries[at] = entry
    elif len(entries) < NEWEST or entry.step > entries[-NEWEST].step:
        entries.insert(at, entry)


@dataclass(slots=True)
class StoredFrame:
    """What is remembered of a stored frame that may still be added to a neighbour."""

    step: int
    last_step: int
    scale: float
    number: int  # how many frames its role had when it (its newest part) came
    weight: int = 1  # recorded frames in it
    apart: bool = False  # holds NaN or Inf
    ends: bool = False  # may not be added to the one after it

    def may_join(self, after: StoredFrame) -> bool:
        """As far as is known without the steps."""
        return not (self.ends or self.apart or after.apart or self.scale != after.scale)
