"""SQLite rows as records: one function a table, and the state of a run as a reader sees it."""

from __future__ import annotations

import time
from typing import Any

from ampscope.errors import StoreError
from ampscope.records import (
    Event,
    Frame,
    ModuleRecord,
    OpRecord,
    Role,
    RunInfo,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store import codec, db, frames
from ampscope.store.processes import HEARTBEAT_STALE_S, is_alive

Row = tuple[Any, ...]

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
FRAME = "step,scale,blob,last_step"
SHADOW = (
    "step,module,role,total,lost,subnormal,zero_before,relative_error,cosine,max_abs_fp32,"
    "below_range"
)


def run_info(row: Row) -> RunInfo:
    """A row of :data:`RUN`. A run that its process left behind is *lost*."""
    (id_, spec, state, created, started, ended, heartbeat, pid, pid_started, machine) = row[:10]
    message, traceback, steps_done = row[10:]
    shown = _state(state)
    if shown.is_active:
        last_sign = created if heartbeat is None else heartbeat
        silent = time.time() - last_sign > HEARTBEAT_STALE_S
        if silent or not is_alive(pid, pid_started):
            shown = State.LOST
            message = message or (
                f"The process ended without a word after {steps_done:,} steps (killed, out of "
                "memory, or the store's disk is full). What it recorded is kept."
            )
    return RunInfo(
        id=id_,
        spec=codec.spec_from_json(spec),
        state=shown,
        created=created,
        started=started,
        ended=ended,
        heartbeat=heartbeat,
        pid=pid,
        machine=codec.machine_from_json(machine),
        message=message,
        traceback=traceback,
        steps_done=steps_done,
        overhead_share=None,
    )


def step(row: Row) -> StepRecord:
    """A row of :data:`STEP`."""
    number, loss, scale, counter, skipped, norm, lr, time_s, overhead, peak, moved = row[:11]
    return StepRecord(
        step=number,
        loss=db.from_sql(loss),
        scale=db.from_sql(scale),
        growth_counter=counter,
        skipped=bool(skipped),
        grad_norm=db.from_sql(norm),
        lr=db.from_sql(lr),
        step_time_s=db.from_sql(time_s),
        overhead_s=db.from_sql(overhead),
        peak_bytes=peak,
        moved_share=db.from_sql(moved),
        op_set=row[11],
        ended_at=row[12],
        unclipped_norm=db.from_sql(row[13]),
    )


def module(row: Row) -> ModuleRecord:
    """A row of :data:`MODULE`."""
    index, path, kind, dtypes, parameters, is_leaf, shared_with = row
    return ModuleRecord(index, path, kind, dtypes, parameters, bool(is_leaf), shared_with)


def op(row: Row) -> OpRecord:
    """A row of :data:`OP`."""
    index, phase, name, inputs, outputs, count, flops, is_cast = row
    return OpRecord(index, phase, name, inputs, outputs, count, flops, bool(is_cast))


def shadow(row: Row) -> ShadowRecord:
    """A row of :data:`SHADOW`."""
    number, index, role, total, lost, subnormal, zero_before = row[:7]
    error, cosine, largest = (db.from_sql(value) for value in row[7:10])
    return ShadowRecord(
        step=number,
        module=index,
        role=Role(role),
        total=total,
        lost=lost,
        subnormal=subnormal,
        zero_before=zero_before,
        relative_error=error,
        cosine=cosine,
        max_abs_fp32=largest,
        below_range=row[10],
    )


def frame(role: Role, row: Row) -> Frame:
    """A row of :data:`FRAME`."""
    number, scale, blob, last_step = row
    modules, dtypes, rows = frames.unpack(blob)
    return Frame(number, role, modules, dtypes, rows, db.from_sql(scale) or 0.0, last_step)


def event(row: Row) -> Event:
    """A row of :data:`EVENT`."""
    number, kind, name, text, path, value = row
    return Event(number, kind, name, text, path, db.from_sql(value))


def _state(text: str) -> State:
    try:
        return State(text)
    except ValueError as error:
        raise StoreError(
            f"A stored run has the unknown state {text!r}; delete this run."
        ) from error
