"""SQLite rows as records, made from their fields, and records as INSERT statements.

Records are read (:func:`run_info`, :func:`select`, :func:`frame`) and written (:func:`of_records`,
:func:`insert`); the row of one run has a writer of its own (:class:`RunRow`).
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeVar

from ampscope import records
from ampscope.errors import StoreError
from ampscope.masks import hide_environment
from ampscope.privacy import (
    leaves_out,
    recorded,
    recorded_machine,
    recorded_text,
    recorded_traceback,
)
from ampscope.store import codec, db, frames
from ampscope.store.processes import HEARTBEAT_STALE_S, is_alive, process_start_time

Row = tuple[Any, ...]
T = TypeVar("T")
Query = Callable[..., Sequence[Row]]  # a statement and its values -> rows
DAMAGED = "damaged run"  # what the list of runs calls one whose row cannot be read

RUN = (
    "id,spec,state,created,started,ended,heartbeat,pid,pid_started,machine,message,traceback,"
    "steps_done"
)
FRAME = "step,scale,blob,last_step"
_TABLES = {  # of each record: its table, and what one of its rows is called
    records.StepRecord: ("step", "step"),
    records.ModuleRecord: ("module", "module"),
    records.OpRecord: ("op", "op"),
    records.ShadowRecord: ("shadow", "comparison with the fp32 shadow"),
    records.Event: ("event", "report"),
    records.NonFiniteRecord: ("nonfinite", "gradient with NaN or Inf"),
    records.Sample: ("telemetry", "reading of the machine"),
}


def _time(value: object) -> float:
    found = codec.moment(value)
    if found is None:
        raise codec.Damaged("it has no time")
    return found


_BY_TYPE: dict[str, Callable[[Any], object]] = {
    "int": codec.whole,
    "int | None": codec.whole_or_none,
    "float": _time,  # the only number that every row has
    "float | None": codec.real,
    "bool": lambda value: bool(codec.whole(value)),
    "str": codec.text,
    "Role": records.Role,
}
_BY_FIELD: dict[tuple[type, str], Callable[[Any], object]] = {
    (records.StepRecord, "ended_at"): codec.moment,
    (records.Event, "step"): lambda value: codec.whole(value, -1),  # before the first step
}
_NAMES = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in _TABLES}
_CHECKS = {  # what reads each field of a record from its column
    kind: tuple(
        _BY_FIELD.get((kind, field.name)) or _BY_TYPE[str(field.type)]
        for field in dataclasses.fields(kind)
    )
    for kind in _TABLES
}


def _columns(kind: type[Any]) -> tuple[str, ...]:
    return tuple("module" if name == "index" else name for name in _NAMES[kind])


def run_info(row: Row) -> records.RunInfo:
    """A row of :data:`RUN`. A run that its process left behind is *lost*; one whose row is damaged
    is *failed* and says so, so that it can be deleted and hides no other."""
    try:
        return _run_info(row)
    except (StoreError, ValueError, TypeError, OverflowError) as error:
        return _damaged_run(row, error)


def _run_info(row: Row) -> records.RunInfo:
    (id_, spec, state, created, started, ended, heartbeat, pid, pid_started, machine) = row[:10]
    message, traceback, steps_done = row[10:]
    try:
        shown = records.State(state)
    except ValueError as error:
        raise StoreError(
            f"A stored run has the unknown state {state!r}; delete this run."
        ) from error
    message, steps_done = recorded_text(codec.text(message)), codec.whole(steps_done)
    if not codec.is_run_id(id_):
        raise codec.Damaged("its id is not 12 hexadecimal digits")
    made, last_sign = codec.moment(created), codec.moment(heartbeat)
    if made is None:
        raise codec.Damaged("it has no time of its creation")
    pid = codec.whole_or_none(pid, high=codec.MOST_PID)
    if shown.is_active:
        silent = time.time() - (made if last_sign is None else last_sign) > HEARTBEAT_STALE_S
        if silent or not is_alive(pid, codec.real(pid_started)):
            shown = records.State.LOST
            message = message or (
                f"The process exited without reporting an error after {steps_done:,} steps "
                "(killed, out of "
                "memory, or the store's disk is full). What it recorded is kept."
            )
    return records.RunInfo(
        id=id_,
        spec=codec.spec_from_json(spec),
        state=shown,
        created=made,
        started=codec.moment(started),
        ended=codec.moment(ended),
        heartbeat=last_sign,
        pid=pid,
        machine=codec.machine_from_json(machine),
        message=message,
        traceback=recorded_traceback(codec.text(traceback, codec.LONGEST_TRACEBACK), parsed=False),
        steps_done=steps_done,
        overhead_share=None,
    )


def _damaged_run(row: Row, error: Exception) -> records.RunInfo:
    """What can be said of a row that is not as ampscope writes it."""
    id_, created = row[0], row[3]
    how = str(error).partition("(")[2].partition(");")[0] or str(error)
    is_time = type(created) in (int, float) and 0 <= created <= codec.LAST_TIME
    return records.RunInfo(
        id=codec.text(id_) if type(id_) is str else ascii(id_),
        spec=records.RunSpec(DAMAGED, kind="probe", size="", precision="", label=DAMAGED),
        state=records.State.FAILED,
        created=float(created) if is_time else 0.0,
        started=None,
        ended=None,
        heartbeat=None,
        pid=None,
        machine=None,
        message=f"What the store holds of this run is damaged ({how}). Delete the run, or restore "
        "the store from a copy.",
        traceback="",
        steps_done=0,
        overhead_share=None,
    )


def select(query: Query, kind: type[T], rest: str, run_id: str, *values: object) -> list[T]:
    """The records of a run. ``rest`` is SQL that follows "WHERE run=?", and ``values`` are its own.
    Raises StoreError for a row that does not hold what its table says."""
    rows = query(f"{selected(kind)} WHERE run=? {rest}", run_id, *values)
    return [record(kind, row) for row in rows]


def selected(kind: type[Any]) -> str:
    """SQL for the columns of a record type, in the order of its fields."""
    names = ",".join(f'"{name}"' for name in _columns(kind))  # "order" is a word of SQL
    return f"SELECT {names} FROM {_TABLES[kind][0]}"


def record(kind: type[T], row: Row) -> T:
    """A row of :func:`selected` as a record. Raises StoreError where it holds something else."""
    checks = zip(_CHECKS[kind], row, strict=True)
    return _checked(_TABLES[kind][1], lambda: kind(*[check(value) for check, value in checks]))


def frame(role: records.Role, row: Row) -> records.Frame:
    """A row of :data:`FRAME`. Raises StoreError where it holds something else."""

    def made() -> records.Frame:
        number, scale, blob, last_step = row
        modules, dtypes, rows = frames.unpack(codec.blob(blob))
        factor, last = codec.real(scale) or 0.0, codec.whole_or_none(last_step)
        return records.Frame(codec.whole(number), role, modules, dtypes, rows, factor, last)

    return _checked("histogram", made)


def span(row: Row) -> tuple[int, int]:
    """First and last step of a frame. Raises StoreError where they are no numbers."""
    return _checked("histogram", lambda: (codec.whole(row[0]), codec.whole(row[1])))


def _checked(what: str, read: Callable[[], T]) -> T:
    """A row that does not hold what its table says is one sentence, not a traceback."""
    try:
        return read()
    except (ValueError, TypeError, OverflowError) as error:
        raise StoreError(f"A stored {what} is damaged ({error}).") from error


Insert = tuple[str, tuple[object, ...]]  # statement, values


def of_records(
    table: str, run_id: str, given: Iterable[object], **more: object
) -> Iterator[Insert]:
    """One INSERT per record, whose fields are the columns of its table, with ``more`` columns in
    front of the record's own."""
    before, names = (run_id, *more.values()), tuple(more)
    for record in given:
        kind: Any = type(record)
        columns, statement, fields = _of_kind(table, kind, names)
        yield statement, tuple(map(codec.to_column, columns, before + fields(record)))


def of_row(table: str, storable: Mapping[str, str] = {}, /, **columns: object) -> Insert:
    """The statement for one row that is not a record. ``storable``: columns that are so already."""
    statement = _statement(table, (*columns, *storable))
    return statement, (*map(codec.to_column, columns, columns.values()), *storable.values())


@cache
def _of_kind(
    table: str, kind: type[Any], more: tuple[str, ...]
) -> tuple[tuple[str, ...], str, Callable[[object], Row]]:
    """Columns, statement and values of one type of record: looked up once, used at every step."""
    columns = ("run", *more, *_columns(kind))
    statement = _statement(table, columns)
    if kind is records.ModuleRecord:  # its path is a name, an event's is a file
        columns = tuple("module path" if name == "path" else name for name in columns)
    return columns, statement, attrgetter(*_NAMES[kind])


@cache
def _statement(table: str, columns: tuple[str, ...]) -> str:
    names = ",".join(f'"{name}"' for name in columns)  # "order" is a word of SQL
    marks = ",".join("?" * len(columns))
    return f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"


def insert(connection: sqlite3.Connection, given: Iterable[Insert]) -> None:
    """Carry the statements out in the order in which they come, one call for each stretch of equal
    ones. They may come from an iterator: none is kept."""
    for statement, alike in groupby(given, itemgetter(0)):
        connection.executemany(statement, (row for _, row in alike))


class RunRow:
    """The row of one run: who writes it, in which state it is, its signs of life. Thread-safe: a
    heartbeat thread may call :meth:`beat` at any time."""

    def __init__(
        self, path: Path, run_id: str, journal: str = "WAL", wait_ms: int = db.BUSY_TIMEOUT_MS
    ) -> None:
        self.path = path
        self.run_id = run_id
        self._connection = db.open_for_writing(path, journal, wait_ms)
        self._lock = threading.Lock()

    def wait_at_most(self, seconds: float) -> None:
        """For another program that holds the store, at each write from here on."""
        with self._lock, db.translated(self.path):
            self._connection.execute(f"PRAGMA busy_timeout = {max(0, int(seconds * 1000))}")

    def _register(self, spec: records.RunSpec) -> None:
        """State queued, owned by this process."""
        with db.translated(self.path), db.transaction(self._connection):
            self._connection.execute(
                "INSERT INTO run (id, spec, state, created, heartbeat, pid, pid_started)"
                " VALUES (?,?,?,?,?,?,?)",
                (
                    self.run_id,
                    codec.to_json(recorded(spec)),
                    records.State.QUEUED,
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

    def wait_for(self, machine: records.Machine) -> None:
        """Say where the run takes place: while it waits for its turn there, or when its model has
        moved to another device."""
        self._update(machine=_as_json(machine), heartbeat=time.time())

    def start(self, machine: records.Machine) -> None:
        """State running."""
        now = time.time()
        self._update(
            state=records.State.RUNNING,
            started=now,
            heartbeat=now,
            machine=_as_json(machine),
        )

    def tell(self, message: str) -> None:
        """What the run does while it has nothing to show; its end says another thing."""
        self._update(message=message, heartbeat=time.time())

    def beat(self) -> bool:
        """Sign of life. Returns True when a user asked the run to stop."""
        self._update(heartbeat=time.time())
        with self._lock, db.translated(self.path):
            row = self._connection.execute(
                "SELECT cancel FROM run WHERE id=?", (self.run_id,)
            ).fetchone()
        return row is None or bool(row[0])

    def _update(self, **columns: object) -> None:
        hide_environment()  # a script may have loaded it from a file since
        names = ", ".join(f"{name} = ?" for name in columns)
        values = (codec.to_column(name, value) for name, value in columns.items())
        with self._lock, db.translated(self.path), db.transaction(self._connection):
            self._connection.execute(f"UPDATE run SET {names} WHERE id = ?", (*values, self.run_id))


def _as_json(machine: records.Machine) -> str:
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
