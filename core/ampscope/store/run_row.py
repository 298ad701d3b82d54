"""The row of one run: who writes it, in which state it is, its signs of life."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from pathlib import Path

from ampscope.privacy import leaves_out, recorded, recorded_machine
from ampscope.records import Machine, RunSpec, State
from ampscope.store import codec, db, door
from ampscope.store.processes import process_start_time


class RunRow:
    """One run in one store. Thread-safe: a heartbeat thread may call :meth:`beat` at any time."""

    def __init__(self, path: Path, run_id: str, journal: str = "WAL") -> None:
        self.path = path
        self.run_id = run_id
        self._connection = db.open_for_writing(path, journal)
        self._lock = threading.Lock()

    def _register(self, spec: RunSpec) -> None:
        """State queued, owned by this process."""
        with db.translated(self.path), db.transaction(self._connection):
            self._connection.execute(
                "INSERT INTO run (id, spec, state, created, heartbeat, pid, pid_started)"
                " VALUES (?,?,?,?,?,?,?)",
                (
                    self.run_id,
                    codec.to_json(recorded(spec)),
                    State.QUEUED,
                    time.time(),
                    time.time(),
                    os.getpid(),
                    process_start_time(os.getpid()),
                ),
            )

    def adopt(self) -> None:
        """Make this process the owner of the run (the child, after its parent queued it)."""
        pid = os.getpid()
        self._update(pid=pid, pid_started=process_start_time(pid), heartbeat=time.time())

    def wait_for(self, machine: Machine) -> None:
        """Say where the run is going to take place, while it waits for its turn there."""
        self._update(machine=_as_json(machine), heartbeat=time.time())

    def start(self, machine: Machine) -> None:
        """State running."""
        now = time.time()
        self._update(
            state=State.RUNNING,
            started=now,
            heartbeat=now,
            machine=_as_json(machine),
        )

    def beat(self) -> bool:
        """Sign of life. Returns True when somebody asked the run to stop."""
        self._update(heartbeat=time.time())
        with self._lock, db.translated(self.path):
            row = self._connection.execute(
                "SELECT cancel FROM run WHERE id=?", (self.run_id,)
            ).fetchone()
        return row is None or bool(row[0])

    def _update(self, **columns: object) -> None:
        names = ", ".join(f"{name} = ?" for name in columns)
        values = (door.to_column(name, value) for name, value in columns.items())
        with self._lock, db.translated(self.path), db.transaction(self._connection):
            self._connection.execute(f"UPDATE run SET {names} WHERE id = ?", (*values, self.run_id))


def _as_json(machine: Machine) -> str:
    return codec.to_json(recorded_machine(machine))


def new_run_id() -> str:
    """12 hexadecimal digits: the lowest 9 of the time in ms (they repeat after 2 years), then 3
    that tell runs of the same millisecond apart."""
    return f"{time.time_ns() // 1_000_000:09x}"[-9:] + secrets.token_hex(2)[:3]


def rank_file(folder: Path, rank: int) -> Path:
    """This process's own file in a folder of stores: ``<host>-<pid>-rank<R>.db``."""
    name = "host" if leaves_out("host") else socket.gethostname()
    host = re.sub(r"[^A-Za-z0-9.-]", "_", name) or "host"
    return folder / f"{host}-{os.getpid()}-rank{rank}.db"
