"""The one writer of a run: collects records, writes them in one transaction per flush.

writer = RunWriter.create(path, spec)          # state queued
writer.start(machine)                          # state running
writer.add_step(record) …; writer.flush()      # everything flushed survives a SIGKILL
writer.finish(State.FINISHED)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path

from ampscope import records
from ampscope.masks import hide_environment
from ampscope.observations import Observation
from ampscope.store import codec, db, frames, pyramid, rows
from ampscope.store.codec import encode_observation
from ampscope.store.frame_thinning import FrameThinning
from ampscope.store.rows import RunRow, new_run_id, rank_file

__all__ = [
    "RunWriter",
    "delete_run",
    "keep_conclusion",
    "new_run_id",
    "rank_file",
    "request_cancel",
]

FLUSH_EVERY_S = 0.5  # the dashboard follows a run with at most 2 s delay
FIRST_STEPS = 8  # of a script; each is written: most failures come early, with little to write


class Pace:
    """When to write next, so that writing takes at most ``share`` of a run's time."""

    def __init__(self, share: float, shortest_s: float = 0.0, longest_s: float = math.inf) -> None:
        """``shortest_s``, ``longest_s``: pauses between two writings."""
        self._share = share
        self._limits = shortest_s, longest_s
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """``now`` is any clock's time; the same clock's from one call to the next."""
        return now >= self._next

    def wrote(self, started: float, took_s: float) -> None:
        """Plan the next write after one that began at ``started`` and took ``took_s`` seconds."""
        shortest, longest = self._limits
        self._next = started + min(max(shortest, took_s / self._share), longest)


class RunWriter(RunRow):
    """Writes one run. Records are added by one thread; a heartbeat thread may call :meth:`beat`."""

    def __init__(
        self, path: Path, run_id: str, journal: str = "WAL", wait_ms: int = db.BUSY_TIMEOUT_MS
    ) -> None:
        super().__init__(path, run_id, journal, wait_ms)
        self._may_be_late = False
        self._pending: list[rows.Insert] = []
        self._steps: list[int] = []
        self._results = 0  # of those that are pending
        self._numbered: dict[str, int] = {}  # next number in a table whose rows are in order
        self._thinning: FrameThinning | None = None
        self._last_flush = time.monotonic()

    @classmethod
    def create(
        cls, path: Path | str, spec: records.RunSpec, run_id: str = "", wait_s: float | None = None
    ) -> RunWriter:
        """Register a new run in state queued, owned by this process. ``run_id``: of
        :func:`new_run_id`, for those who must know it before. A watched run may be given a folder
        (one that exists, or text that ends in "/"): it writes a file of its own there, on a network
        file system as well; see :func:`rank_file`. ``wait_s``: for another program that holds the
        store, in place of 30 s; what a flush cannot write then is kept for the next."""
        run_id = run_id or new_run_id()
        wait_ms = db.BUSY_TIMEOUT_MS if wait_s is None else int(wait_s * 1000)
        if spec.kind != "watch":  # probes and scripts are short, and stay as they were recorded
            writer = cls(Path(path), run_id, wait_ms=wait_ms)
        elif str(path).endswith("/") or Path(path).is_dir():
            writer = cls(rank_file(Path(path), spec.rank), run_id, "DELETE", wait_ms)
        else:
            writer = cls(Path(path), run_id, wait_ms=wait_ms)
        try:
            writer._register(spec)
        except BaseException:
            writer._connection.close()
            raise
        writer._may_be_late = wait_s is not None
        writer._thinning = FrameThinning(writer.run_id) if spec.kind == "watch" else None
        return writer

    def finish(self, state: records.State, message: str = "", traceback: str = "") -> None:
        """Write what is pending, then the final state with its one-sentence message."""
        self.flush()
        self._update(
            state=state,
            ended=time.time(),
            heartbeat=time.time(),
            message=message,
            traceback=traceback,
        )

    def add_modules(self, modules: Iterable[records.ModuleRecord]) -> None:
        """The modules of the run's model."""
        self._pending += rows.of_records("module", self.run_id, modules)

    def add_step(self, record: records.StepRecord) -> None:
        """One step; it counts as done when it is flushed."""
        self._pending += rows.of_records("step", self.run_id, (record,))
        self._steps.append(record.step)

    def add_ops(self, op_set: int, ops: Iterable[records.OpRecord]) -> None:
        """The ops of the steps whose record names ``op_set``."""
        self._pending += rows.of_records("op", self.run_id, ops, op_set=op_set)

    def add_frame(self, frame: records.Frame) -> None:
        """All histograms of one role at one step, as one row with a blob (store.frames packs it,
        :meth:`Reader.frame` unpacks it)."""
        if self._thinning is not None and not self._thinning.admit(frame):
            return
        blob = frames.pack(frame.modules, frame.dtypes, frame.rows)
        key = {"run": self.run_id, "step": frame.step, "role": frame.role}
        self._pending.append(
            rows.of_row("frame", **key, scale=frame.scale, blob=blob, last_step=frame.last_step)
        )

    def add_event(self, event: records.Event) -> None:
        """Something that a watched run reports, kept in the given order."""
        hide_environment()
        seq = self._next_number("event")
        self._pending += rows.of_records("event", self.run_id, (event,), seq=seq)

    def add_result(self, result: records.Result) -> None:
        """What a measurement found, kept in the given order."""
        kind, data = codec.encode_result(result)
        key = {"run": self.run_id, "seq": self._next_number("result")}
        self._pending.append(rows.of_row("result", **key, kind=kind, data=data))
        self._results += 1

    def add_samples(self, samples: Iterable[records.Sample]) -> None:
        """What devices read beside the run."""
        self._pending += rows.of_records("telemetry", self.run_id, samples)

    def add_shadow(self, found: Iterable[records.ShadowRecord]) -> None:
        """Comparisons with the fp32 shadow."""
        self._pending += rows.of_records("shadow", self.run_id, found)

    def add_nonfinite(self, found: Iterable[records.NonFiniteRecord]) -> None:
        """Parameters whose gradients held NaN or Inf."""
        self._pending += rows.of_records("nonfinite", self.run_id, found)

    def add_observations(self, observations: Iterable[Observation], *, ahead: bool = False) -> None:
        """Observations of a script, numbered in the given order: over those that were there, or
        ``ahead`` of them, so that a run's outcome stays the last."""
        hide_environment()
        kept = list(observations)
        for seq, observation in enumerate(kept, -len(kept) if ahead else 0):
            kind, data = encode_observation(observation)
            key = {"run": self.run_id, "seq": seq}
            self._pending.append(rows.of_row("observation", **key, kind=kind, data=data))

    def flush_if_due(self) -> None:
        """Flush when the last one is :data:`FLUSH_EVERY_S` ago."""
        if time.monotonic() - self._last_flush >= FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write everything pending in one transaction."""
        with self._lock, db.translated(self.path):
            pending, self._pending = self._pending, []
            steps, self._steps = self._steps, []
            self._last_flush = time.monotonic()
            if not pending:
                return
            try:
                with db.transaction(self._connection):
                    self._write(pending, steps)
                self._results = 0
            except BaseException as error:
                if self._may_be_late and db.is_locked(error):
                    self._pending[:0], self._steps[:0] = pending, steps
                if self._thinning is not None:
                    self._thinning.forget()
                raise

    def _next_number(self, table: str) -> int:
        """Numbers go on where an earlier writer of the run stopped."""
        number = self._numbered.get(table)
        if number is None:
            sql = f"SELECT coalesce(max(seq) + 1, 0) FROM {table} WHERE run=?"
            with self._lock, db.translated(self.path):
                number = int(self._connection.execute(sql, (self.run_id,)).fetchone()[0])
        self._numbered[table] = number + 1
        return number

    def _write(self, pending: list[rows.Insert], steps: list[int]) -> None:
        rows.insert(self._connection, pending)
        pyramid.update(self._connection, self.run_id, steps)
        if self._thinning is not None:
            self._thinning.thin(self._connection)
        self._connection.execute(
            "UPDATE run SET steps_done = steps_done + ?, heartbeat = ? WHERE id = ?",
            (len(steps) + self._results, time.time(), self.run_id),
        )

    def close(self) -> None:
        """Flush and close; the run's state is left as it is."""
        try:
            self.flush()
        finally:
            self._connection.close()


def request_cancel(path: Path, run_id: str) -> None:
    """Ask a run to stop; its process sees it at the next heartbeat."""
    _execute(path, "UPDATE run SET cancel = 1 WHERE id = ?", run_id)


def delete_run(path: Path, run_id: str) -> None:
    """Delete a run and all that was recorded of it."""
    _execute(path, "DELETE FROM run WHERE id = ?", run_id)


def keep_conclusion(path: Path, run_id: str, data: str) -> None:
    """What the diagnosis of this baseline run concluded, in place of what was stored before."""
    _execute(path, "REPLACE INTO conclusion (run, data) VALUES (?, ?)", run_id, data)


def _execute(path: Path, statement: str, *values: str) -> None:
    connection = db.open_for_writing(path)
    try:
        with db.translated(path), db.transaction(connection):
            connection.execute(statement, values)
    finally:
        connection.close()
