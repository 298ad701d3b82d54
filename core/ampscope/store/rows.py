"""SQLite rows as records: one function a table, and the state of a run as a reader sees it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ampscope.errors import StoreError
from ampscope.records import (
    Event,
    Frame,
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
from ampscope.store import codec, door, frames
from ampscope.store.processes import HEARTBEAT_STALE_S, is_alive

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
    message, steps_done = door.text(message), door.whole(steps_done)
    made, last_sign = door.moment(created), door.moment(heartbeat)
    if made is None:
        raise door.Damaged("it has no time of its creation")
    pid = door.whole_or_none(pid, high=door.MOST_PID)
    if shown.is_active:
        silent = time.time() - (made if last_sign is None else last_sign) > HEARTBEAT_STALE_S
        if silent or not is_alive(pid, door.real(pid_started)):
            shown = State.LOST
            message = message or (
                f"The process ended without a word after {steps_done:,} steps (killed, out of "
                "memory, or the store's disk is full). What it recorded is kept."
            )
    return RunInfo(
        id=door.text(id_),
        spec=codec.spec_from_json(spec),
        state=shown,
        created=made,
        started=door.moment(started),
        ended=door.moment(ended),
        heartbeat=last_sign,
        pid=pid,
        machine=codec.machine_from_json(machine),
        message=message,
        traceback=door.text(traceback, door.LONGEST_TRACEBACK),
        steps_done=steps_done,
        overhead_share=None,
    )


def _damaged_run(row: Row, error: Exception) -> RunInfo:
    """What can be said of a row that is not as ampscope writes it."""
    id_, created = row[0], row[3]
    how = str(error).partition("(")[2].partition(");")[0] or str(error)
    is_time = type(created) in (int, float) and 0 <= created <= door.LAST_TIME
    return RunInfo(
        id=door.text(id_) if type(id_) is str else ascii(id_),
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
        step=door.whole(number),
        loss=door.real(loss),
        scale=door.real(scale),
        growth_counter=door.whole_or_none(counter),
        skipped=bool(door.whole(skipped)),
        grad_norm=door.real(norm),
        lr=door.real(lr),
        step_time_s=door.real(time_s),
        overhead_s=door.real(overhead),
        peak_bytes=door.whole_or_none(peak),
        moved_share=door.real(moved),
        op_set=door.whole_or_none(row[11]),
        ended_at=door.moment(row[12]),
        unclipped_norm=door.real(row[13]),
    )


@_row_of("module")
def module(row: Row) -> ModuleRecord:
    """A row of :data:`MODULE`."""
    index, path, kind, dtypes, parameters, is_leaf, shared_with = row
    return ModuleRecord(
        door.whole(index),
        door.text(path),
        door.text(kind),
        door.text(dtypes),
        door.whole(parameters),
        bool(door.whole(is_leaf)),
        door.text(shared_with),
    )


@_row_of("op")
def op(row: Row) -> OpRecord:
    """A row of :data:`OP`."""
    phase, name, inputs, outputs = map(door.text, row[1:5])
    count, flops, is_cast = map(door.whole, row[5:])
    index = door.whole(row[0])
    return OpRecord(index, phase, name, inputs, outputs, count, flops, bool(is_cast))


@_row_of("comparison with the fp32 shadow")
def shadow(row: Row) -> ShadowRecord:
    """A row of :data:`SHADOW`."""
    number, index, role = row[:3]
    total, lost, subnormal, zero_before = map(door.whole, row[3:7])
    error, cosine, largest = map(door.real, row[7:10])
    return ShadowRecord(
        step=door.whole(number),
        module=door.whole(index),
        role=Role(role),
        total=total,
        lost=lost,
        subnormal=subnormal,
        zero_before=zero_before,
        relative_error=error,
        cosine=cosine,
        max_abs_fp32=largest,
        below_range=door.whole_or_none(row[10]),
    )


@_row_of("histogram")
def frame(role: Role, row: Row) -> Frame:
    """A row of :data:`FRAME`."""
    number, scale, blob, last_step = row
    modules, dtypes, rows = frames.unpack(door.blob(blob))
    last = door.whole_or_none(last_step)
    return Frame(door.whole(number), role, modules, dtypes, rows, door.real(scale) or 0.0, last)


@_row_of("histogram")
def span(row: Row) -> tuple[int, int]:
    """First and last step of a frame."""
    return door.whole(row[0]), door.whole(row[1])


@_row_of("report")
def event(row: Row) -> Event:
    """A row of :data:`EVENT`."""
    kind, name, text, path = map(door.text, row[1:5])
    return Event(door.whole(row[0], -1), kind, name, text, path, door.real(row[5]))


@_row_of("gradient with NaN or Inf")
def nonfinite(row: Row) -> NonFiniteRecord:
    """A row of :data:`NONFINITE`."""
    counts = map(door.whole, row[2:])
    return NonFiniteRecord(door.whole(row[0]), door.text(row[1]), *counts)


@_row_of("reading of the machine")
def sample(row: Row) -> Sample:
    """A row of :data:`SAMPLE`."""
    at = door.moment(row[1])
    if at is None:
        raise door.Damaged("it has no time")
    values: list[Any] = [door.real(value) for value in row[2:13]]
    values[2:4] = [None if n is None else int(n) for n in values[2:4]]
    names = (field.name for field in dataclasses.fields(Sample)[2:13])
    return Sample(
        device=door.text(row[0]),
        at=at,
        clock_reasons=door.text(row[13]),
        other_processes=door.whole_or_none(row[14]),
        **dict(zip(names, values, strict=True)),
    )


def _state(text: str) -> State:
    try:
        return State(text)
    except ValueError as error:
        raise StoreError(
            f"A stored run has the unknown state {text!r}; delete this run."
        ) from error
