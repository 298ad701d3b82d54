"""Checked runs into the store, in one transaction: all of them, or none."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ampscope.records import RunInfo, RunSpec, State
from ampscope.store import codec, db, frames, inserts, observation_codec, pyramid, result_codec
from ampscope.store.importing import histograms
from ampscope.store.importing.tables import Contents
from ampscope.store.run_row import new_run_id

STILL_RUNNING = "It was still running when it was exported."


def write(store: Path, runs: Sequence[Contents], origin: str) -> list[str]:
    """Returns the ids in the store, in the same order. A run whose id is taken gets a new one, and
    every group gets a new name: a stranger's runs must not join a diagnosis that is there."""
    connection = db.open_for_writing(store)
    with contextlib.closing(connection), db.translated(store), db.transaction(connection):
        ids = {run.info.id: _free(connection, run.info.id) for run in runs}
        groups = {run.info.spec.group: f"imported-{new_run_id()}" for run in runs}
        groups[""] = ""
        for run in runs:
            spec = replace(
                run.info.spec,
                group=groups[run.info.spec.group],
                parent=ids.get(run.info.spec.parent, ""),  # never a run that is there already
                imported=origin,
            )
            _write_run(connection, ids[run.info.id], spec, run)
    return [ids[run.info.id] for run in runs]


def _free(connection: sqlite3.Connection, wanted: str) -> str:
    while connection.execute("SELECT 1 FROM run WHERE id=?", (wanted,)).fetchone():
        wanted = new_run_id()
    return wanted


def _write_run(connection: sqlite3.Connection, run_id: str, spec: RunSpec, run: Contents) -> None:
    connection.execute(*_row(run_id, spec, run))
    for statement, values in _rows(run_id, run):
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


def _rows(run_id: str, run: Contents) -> Iterator[inserts.Insert]:
    yield from inserts.of_records("step", run_id, run.steps)
    yield from inserts.of_records("module", run_id, run.modules)
    yield from inserts.of_records("shadow", run_id, run.shadows)
    yield from inserts.of_records("nonfinite", run_id, run.nonfinite)
    yield from inserts.of_records("telemetry", run_id, run.samples)
    for number, op in run.ops:
        yield from inserts.of_records("op", run_id, (op,), op_set=number)
    for seq, event in enumerate(run.events):
        yield from inserts.of_records("event", run_id, (event,), seq=seq)
    for seq, observation in enumerate(run.observations):
        kind, data = observation_codec.encode(observation)
        yield inserts.of_row("observation", run=run_id, seq=seq, kind=kind, data=data)
    for seq, result in enumerate(run.results):
        kind, data = result_codec.encode(result)
        yield inserts.of_row("result", run=run_id, seq=seq, kind=kind, data=data)
    for frame in histograms.frames(run.histograms):
        blob = frames.pack(frame.modules, frame.dtypes, frame.rows)
        key = {"run": run_id, "step": frame.step, "role": frame.role}
        yield inserts.of_row(
            "frame", **key, scale=frame.scale, blob=blob, last_step=frame.last_step
        )
