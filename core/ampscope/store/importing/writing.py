"""Checked runs into the store, in one transaction: all of them, or none."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ampscope.records import Frame, RunInfo, RunSpec, State
from ampscope.store import codec, db, frames, inserts, observation_codec, pyramid, result_codec
from ampscope.store.importing.tables import Contents
from ampscope.store.run_row import new_run_id

STILL_RUNNING = "It was still running when it was exported."


def write(store: Path, runs: Sequence[tuple[Contents, list[Frame]]], origin: str) -> list[str]:
    """Returns the ids in the store, in the same order. A run whose id is taken gets a new one, and
    every group gets a new name: a stranger's runs must not join a diagnosis that is there."""
    connection = db.open_for_writing(store)
    with contextlib.closing(connection), db.translated(store), db.transaction(connection):
        ids = {run.info.id: _free(connection, run.info.id) for run, _ in runs}
        groups = {run.info.spec.group: f"imported-{new_run_id()}" for run, _ in runs}
        groups[""] = ""
        for run, found in runs:
            spec = replace(
                run.info.spec,
                group=groups[run.info.spec.group],
                parent=ids.get(run.info.spec.parent, run.info.spec.parent),
                imported=origin,
            )
            _write_run(connection, ids[run.info.id], spec, run, found)
    return [ids[run.info.id] for run, _ in runs]


def _free(connection: sqlite3.Connection, wanted: str) -> str:
    while connection.execute("SELECT 1 FROM run WHERE id=?", (wanted,)).fetchone():
        wanted = new_run_id()
    return wanted


def _write_run(
    connection: sqlite3.Connection, run_id: str, spec: RunSpec, run: Contents, found: list[Frame]
) -> None:
    for statement, values in (_row(run_id, spec, run), *_rows(run_id, run, found)):
        connection.execute(statement, values)
    pyramid.update(connection, run_id, [step.step for step in run.steps])


def _row(run_id: str, spec: RunSpec, run: Contents) -> inserts.Insert:
    """Nobody writes it any more: it has no process, and a state that a run can end in."""
    info = run.info
    return inserts.of_row(
        "run",
        id=run_id,
        spec=codec.to_json(spec),
        state=State.LOST if info.state.is_active else info.state,
        created=info.created,
        started=info.started,
        ended=info.ended,
        heartbeat=info.heartbeat,
        machine=None if info.machine is None else codec.to_json(info.machine),
        message=_message(info, spec.imported),
        traceback=info.traceback,
        steps_done=len(run.steps) + len(run.results),
    )


def _message(info: RunInfo, origin: str) -> str:
    parts = [info.message, STILL_RUNNING if info.state.is_active else ""]
    return " ".join([*filter(None, parts), f"Imported from {origin}."])


def _rows(run_id: str, run: Contents, found: list[Frame]) -> list[inserts.Insert]:
    rows = [
        *inserts.of_records("step", run_id, run.steps),
        *inserts.of_records("module", run_id, run.modules),
        *inserts.of_records("shadow", run_id, run.shadows),
        *inserts.of_records("nonfinite", run_id, run.nonfinite),
        *inserts.of_records("telemetry", run_id, run.samples),
    ]
    for number, op in run.ops:
        rows += inserts.of_records("op", run_id, (op,), op_set=number)
    for seq, event in enumerate(run.events):
        rows += inserts.of_records("event", run_id, (event,), seq=seq)
    for table, named in (
        ("observation", [observation_codec.encode(o) for o in run.observations]),
        ("result", [result_codec.encode(r) for r in run.results]),
    ):
        for seq, (kind, data) in enumerate(named):
            rows.append(inserts.of_row(table, run=run_id, seq=seq, kind=kind, data=data))
    for frame in found:
        blob = frames.pack(frame.modules, frame.dtypes, frame.rows)
        key = {"run": run_id, "step": frame.step, "role": frame.role}
        rows.append(
            inserts.of_row("frame", **key, scale=frame.scale, blob=blob, last_step=frame.last_step)
        )
    return rows
