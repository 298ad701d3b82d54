"""The one writer of a run: collects records, writes them in one transaction a flush.

writer = RunWriter.create(path, spec)          # state queued
writer.start(machine)                          # state running
writer.add_step(record) …; writer.flush()      # everything flushed survives a SIGKILL
writer.finish(State.FINISHED)
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from ampscope.observations import Observation
from ampscope.records import (
    Frame,
    Machine,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    RunSpec,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store import codec, db, frames, inserts
from ampscope.store.observation_codec import encode
from ampscope.store.processes import process_start_time

FLUSH_EVERY_S = 0.5  # the dashboard follows a run with at most 2 s delay


class RunWriter:
    """Writes one run. Thread-safe: a heartbeat thread may call :meth:`beat` at any time."""

    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self._connection = db.open_for_writing(path)
        self._lock = threading.Lock()
        self._pending: list[inserts.Insert] = []
        self._steps = 0
        self._last_flush = time.monotonic()

    @classmethod
    def create(cls, path: Path, spec: RunSpec) -> RunWriter:
        """Register a new run in state queued, owned by this process."""
        run_id = new_run_id()
        writer = cls(path, run_id)
        with db.translated(path), db.transaction(writer._connection):
            writer._connection.execute(
                "INSERT INTO run (id, spec, state, created, heartbeat, pid, pid_started)"
                " VALUES (?,?,?,?,?,?,?)",
                (
                    run_id,
                    codec.to_json(spec),
                    State.QUEUED,
                    time.time(),
                    time.time(),
                    os.getpid(),
                    process_start_time(os.getpid()),
                ),
            )
        return writer

    def adopt(self) -> None:
        """Make this process the owner of the run (the child, after its parent queued it)."""
        pid = os.getpid()
        self._update(pid=pid, pid_started=process_start_time(pid), heartbeat=time.time())

    def wait_for(self, machine: Machine) -> None:
        """Say where the run is going to take place, while it waits for its turn there."""
        self._update(machine=codec.to_json(machine), heartbeat=time.time())

    def start(self, machine: Machine) -> None:
        """State running."""
        now = time.time()
        self._update(
            state=State.RUNNING, started=now, heartbeat=now, machine=codec.to_json(machine)
        )

    def finish(self, state: State, message: str = "", traceback: str = "") -> None:
        """Write what is pending, then the final state with its one-sentence message."""
        self.flush()
        self._update(
            state=state,
            ended=time.time(),
            heartbeat=time.time(),
            message=message,
            traceback=traceback,
        )

    def beat(self) -> bool:
        """Sign of life. Returns True when somebody asked the run to stop."""
        self._update(heartbeat=time.time())
        with self._lock, db.translated(self.path):
            row = self._connection.execute(
                "SELECT cancel FROM run WHERE id=?", (self.run_id,)
            ).fetchone()
        return row is None or bool(row[0])

    def add_modules(self, modules: Iterable[ModuleRecord]) -> None:
        """The modules of the run's model."""
        self._pending += inserts.of_records("module", self.run_id, modules)

    def add_step(self, record: StepRecord) -> None:
        """One step; it counts as done when it is flushed."""
        self._pending += inserts.of_records("step", self.run_id, (record,))
        self._steps += 1

    def add_ops(self, op_set: int, ops: Iterable[OpRecord]) -> None:
        """The ops of the steps whose record names ``op_set``."""
        self._pending += inserts.of_records("op", self.run_id, ops, op_set=op_set)

    def add_frame(self, frame: Frame) -> None:
        """All histograms of one role at one step, packed."""
        blob = frames.pack(frame.modules, frame.dtypes, frame.rows)
        key = {"run": self.run_id, "step": frame.step, "role": frame.role}
        self._pending.append(inserts.of_row("frame", **key, scale=frame.scale, blob=blob))

    def add_shadow(self, records: Iterable[ShadowRecord]) -> None:
        """Comparisons with the fp32 shadow."""
        self._pending += inserts.of_records("shadow", self.run_id, records)

    def add_nonfinite(self, records: Iterable[NonFiniteRecord]) -> None:
        """Parameters whose gradients held NaN or Inf."""
        self._pending += inserts.of_records("nonfinite", self.run_id, records)

    def add_observations(self, observations: Iterable[Observation]) -> None:
        """What was seen of a script, numbered in the given order."""
        for seq, observation in enumerate(observations):
            kind, data = encode(observation)
            key = {"run": self.run_id, "seq": seq}
            self._pending.append(inserts.of_row("observation", **key, kind=kind, data=data))

    def flush_if_due(self) -> None:
        """Flush when the last one is :data:`FLUSH_EVERY_S` ago."""
        if time.monotonic() - self._last_flush >= FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write everything pending in one transaction."""
        with self._lock, db.translated(self.path):
            pending, self._pending = self._pending, []
            steps, self._steps = self._steps, 0
            self._last_flush = time.monotonic()
            if not pending:
                return
            with db.transaction(self._connection):
                for statement, row in pending:
                    self._connection.execute(statement, row)
                self._connection.execute(
                    "UPDATE run SET steps_done = steps_done + ?, heartbeat = ? WHERE id = ?",
                    (steps, time.time(), self.run_id),
                )

    def close(self) -> None:
        """Flush and close; the run's state is left as it is."""
        try:
            self.flush()
        finally:
            self._connection.close()

    def _update(self, **columns: object) -> None:
        names = ", ".join(f"{name} = ?" for name in columns)
        with self._lock, db.translated(self.path), db.transaction(self._connection):
            self._connection.execute(
                f"UPDATE run SET {names} WHERE id = ?", (*columns.values(), self.run_id)
            )


def new_run_id() -> str:
    """12 hexadecimal digits: the lowest 9 of the time in ms (they repeat after 2 years), then 3
    that tell runs of the same millisecond apart."""
    return f"{time.time_ns() // 1_000_000:09x}"[-9:] + secrets.token_hex(2)[:3]


def request_cancel(path: Path, run_id: str) -> None:
    """Ask a run to stop; its process sees it at the next heartbeat."""
    _execute(path, "UPDATE run SET cancel = 1 WHERE id = ?", run_id)


def delete_run(path: Path, run_id: str) -> None:
    """Delete a run and all that was recorded of it."""
    _execute(path, "DELETE FROM run WHERE id = ?", run_id)


def _execute(path: Path, statement: str, run_id: str) -> None:
    connection = db.open_for_writing(path)
    try:
        with db.translated(path), db.transaction(connection):
            connection.execute(statement, (run_id,))
    finally:
        connection.close()
