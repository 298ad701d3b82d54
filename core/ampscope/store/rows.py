"""SQLite rows as records, one function a table, and records as INSERT statements.

Between them the row of one run (:class:`RunRow`): who writes it, its state and its signs of life.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ampscope.errors import StoreError
from ampscope.privacy import leaves_out, recorded, recorded_machine
from ampscope.records import (
    Event,
    Frame,
    Machine,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    RunInfo,
    RunSpec,
    Sample,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store import codec, db, frames
from ampscope.store.processes import HEARTBEAT_STALE_S, is_alive, process_start_time

Row = tuple[Any, ...]
P = ParamSpec("P")
R = TypeVar("R")
DAMAGED = "damaged run"  # what the list of runs calls one whose row cannot be read

RUN = (
    "id,spec,state,created,started,ended,heartbeat,pid,pid_started,machine,message,traceback,"
    "steps_done"
)
STEP = (
    "step,loss,scale,growth_counter,skipped,grad_norm,lr,step_time_s,overhead_s,peak_bytes,"
    "moved_share,op_set,ended_at,unclipped_norm"
)
MODULE = "module,path,type,weight_dtypes,parameter_count,is_leaf,shared_with"
OP = "module,phase,op,inputs,outputs,count,flops,is_cast"
EVENT = "step,kind,name,text,path,value"
SAMPLE = (
    "device,at,busy_percent,own_percent,memory_used_bytes,own_memory_bytes,power_w,energy_j,"
    "temperature_c,clock_mhz,memory_clock_mhz,pcie_rx_bytes_s,pcie_tx_bytes_s,clock_reasons,"
    "other_processes"
)
NONFINITE = 'step,parameter,"order",total,nan,pos_inf,neg_inf'
FRAME = "step,scale,blob,last_step"
SHADOW = (
    "step,module,role,total,lost,subnormal,zero_before,relative_error,cosine,max_abs_fp32,"
    "below_range"
)


def run_info(row: Row) -> RunInfo:
    """A row of :data:`RUN`. A run that its process left behind is *lost*; one whose row is damaged
    is *failed* and says so, so that it can be deleted and hides no other."""
    try:
        return _run_info(row)
    except (StoreError, ValueError, TypeError, OverflowError) as error:
        return _damaged_run(row, error)


def _run_info(row: Row) -> RunInfo:
    (id_, spec, state, created, started, ended, heartbeat, pid, pid_started, machine) = row[:10]
    message, traceback, steps_done = row[10:]
    shown = _state(state)
    message, steps_done = codec.text(message), codec.whole(steps_done)
    made, last_sign = codec.moment(created), codec.moment(heartbeat)
    if made is None:
        raise codec.Damaged("it has no time of its creation")
    pid = codec.whole_or_none(pid, high=codec.MOST_PID)
    if shown.is_active:
        silent = time.time() - (made if last_sign is None else last_sign) > HEARTBEAT_STALE_S
        if silent or not is_alive(pid, codec.real(pid_started)):
            shown = State.LOST
            message = message or (
                f"The process exited without reporting an error after {steps_done:,} steps "
                "(killed, out of "
                "memory, or the store's disk is full). What it recorded is kept."
            )
    return RunInfo(
        id=codec.text(id_),
        spec=codec.spec_from_json(spec),
        state=shown,
        created=made,
        started=codec.moment(started),
        ended=codec.moment(ended),
        heartbeat=last_sign,
        pid=pid,
        machine=codec.machine_from_json(machine),
        message=message,
        traceback=codec.text(traceback, codec.LONGEST_TRACEBACK),
        steps_done=steps_done,
        overhead_share=None,
    )


def _damaged_run(row: Row, error: Exception) -> RunInfo:
    """What can be said of a row that is not as ampscope writes it."""
    id_, created = row[0], row[3]
    how = str(error).partition("(")[2].partition(");")[0] or str(error)
    is_time = type(created) in (int, float) and 0 <= created <= codec.LAST_TIME
    return RunInfo(
        id=codec.text(id_) if type(id_) is str else ascii(id_),
        spec=RunSpec(DAMAGED, kind="probe", size="", precision="", label=DAMAGED),
        state=State.FAILED,
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


def _row_of(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A row that does not hold what its table says is one sentence, not a traceback."""

    def decorated(read: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(read)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return read(*args, **kwargs)
            except (ValueError, TypeError, OverflowError) as error:
                raise StoreError(f"A stored {what} is damaged ({error}).") from error

        return checked

    return decorated


@_row_of("step")
def step(row: Row) -> StepRecord:
    """A row of :data:`STEP`."""
    number, loss, scale, counter, skipped, norm, lr, time_s, overhead, peak, moved = row[:11]
    return StepRecord(
        step=codec.whole(number),
        loss=codec.real(loss),
        scale=codec.real(scale),
        growth_counter=codec.whole_or_none(counter),
        skipped=bool(codec.whole(skipped)),
        grad_norm=codec.real(norm),
        lr=codec.real(lr),
        step_time_s=codec.real(time_s),
        overhead_s=codec.real(overhead),
        peak_bytes=codec.whole_or_none(peak),
        moved_share=codec.real(moved),
        op_set=codec.whole_or_none(row[11]),
        ended_at=codec.moment(row[12]),
        unclipped_norm=codec.real(row[13]),
    )


@_row_of("module")
def module(row: Row) -> ModuleRecord:
    """A row of :data:`MODULE`."""
    index, path, kind, dtypes, parameters, is_leaf, shared_with = row
    return ModuleRecord(
        codec.whole(index),
        codec.text(path),
        codec.text(kind),
        codec.text(dtypes),
        codec.whole(parameters),
        bool(codec.whole(is_leaf)),
        codec.text(shared_with),
    )


@_row_of("op")
def op(row: Row) -> OpRecord:
    """A row of :data:`OP`."""
    phase, name, inputs, outputs = map(codec.text, row[1:5])
    count, flops, is_cast = map(codec.whole, row[5:])
    index = codec.whole(row[0])
    return OpRecord(index, phase, name, inputs, outputs, count, flops, bool(is_cast))


@_row_of("comparison with the fp32 shadow")
def shadow(row: Row) -> ShadowRecord:
    """A row of :data:`SHADOW`."""
    number, index, role = row[:3]
    total, lost, subnormal, zero_before = map(codec.whole, row[3:7])
    error, cosine, largest = map(codec.real, row[7:10])
    return ShadowRecord(
        step=codec.whole(number),
        module=codec.whole(index),
        role=Role(role),
        total=total,
        lost=lost,
        subnormal=subnormal,
        zero_before=zero_before,
        relative_error=error,
        cosine=cosine,
        max_abs_fp32=largest,
        below_range=codec.whole_or_none(row[10]),
    )


@_row_of("histogram")
def frame(role: Role, row: Row) -> Frame:
    """A row of :data:`FRAME`."""
    number, scale, blob, last_step = row
    modules, dtypes, rows = frames.unpack(codec.blob(blob))
    last = codec.whole_or_none(last_step)
    return Frame(codec.whole(number), role, modules, dtypes, rows, codec.real(scale) or 0.0, last)


@_row_of("histogram")
def span(row: Row) -> tuple[int, int]:
    """First and last step of a frame."""
    return codec.whole(row[0]), codec.whole(row[1])


@_row_of("report")
def event(row: Row) -> Event:
    """A row of :data:`EVENT`."""
    kind, name, text, path = map(codec.text, row[1:5])
    return Event(codec.whole(row[0], -1), kind, name, text, path, codec.real(row[5]))


@_row_of("gradient with NaN or Inf")
def nonfinite(row: Row) -> NonFiniteRecord:
    """A row of :data:`NONFINITE`."""
    counts = map(codec.whole, row[2:])
    return NonFiniteRecord(codec.whole(row[0]), codec.text(row[1]), *counts)


@_row_of("reading of the machine")
def sample(row: Row) -> Sample:
    """A row of :data:`SAMPLE`."""
    at = codec.moment(row[1])
    if at is None:
        raise codec.Damaged("it has no time")
    values: list[Any] = [codec.real(value) for value in row[2:13]]
    values[2:4] = [None if n is None else int(n) for n in values[2:4]]
    names = (field.name for field in dataclasses.fields(Sample)[2:13])
    return Sample(
        device=codec.text(row[0]),
        at=at,
        clock_reasons=codec.text(row[13]),
        other_processes=codec.whole_or_none(row[14]),
        **dict(zip(names, values, strict=True)),
    )


def _state(text: str) -> State:
    try:
        return State(text)
    except ValueError as error:
        raise StoreError(
            f"A stored run has the unknown state {text!r}; delete this run."
        ) from error


# The row of one run: who writes it, in which state it is, its signs of life.


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
        """Sign of life. Returns True when a user asked the run to stop."""
        self._update(heartbeat=time.time())
        with self._lock, db.translated(self.path):
            row = self._connection.execute(
                "SELECT cancel FROM run WHERE id=?", (self.run_id,)
            ).fetchone()
        return row is None or bool(row[0])

    def _update(self, **columns: object) -> None:
        names = ", ".join(f"{name} = ?" for name in columns)
        values = (codec.to_column(name, value) for name, value in columns.items())
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


# INSERT statements for records: a record's fields are the columns of its table.


Insert = tuple[str, tuple[object, ...]]  # statement, values


def of_records(
    table: str, run_id: str, records: Iterable[object], **more: object
) -> Iterator[Insert]:
    """One statement a record, with ``more`` columns in front of the record's own."""
    for record in records:
        # mypy takes object.__hash__ for an unhashable class's; classes are hashable.
        names, values = _fields(type(record))  # type: ignore[arg-type]  # see above
        columns = ("run", *more, *names)
        yield _insert(table, columns, (run_id, *more.values(), *values(record)))


def of_row(table: str, **columns: object) -> Insert:
    """The statement for one row that is not a record."""
    return _insert(table, tuple(columns), tuple(columns.values()))


def _insert(table: str, columns: tuple[str, ...], values: tuple[object, ...]) -> Insert:
    return _statement(table, columns), tuple(map(codec.to_column, columns, values))


@cache
def _statement(table: str, columns: tuple[str, ...]) -> str:
    names = ",".join(f'"{name}"' for name in columns)  # "order" is a word of SQL
    marks = ",".join("?" * len(columns))
    return f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"


@cache
def _fields(kind: type) -> tuple[tuple[str, ...], Callable[[object], tuple[object, ...]]]:
    """The columns of a record type, and what reads them from a record."""
    names = [field.name for field in dataclasses.fields(kind)]
    columns = tuple("module" if name == "index" else name for name in names)
    return columns, operator.attrgetter(*names)
