"""What a class needs of a store: which runs it may look at, and which are equal to a request.

Read anew at every call. Two browsers that ask for the same thing at the same moment must both see a
run that was registered just now.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampscope.records import RunInfo, RunSpec
from ampscope.store import codec, db, rows

RUN_BY_STATE = f"SELECT {rows.RUN} FROM run WHERE state IN ('queued', 'running') ORDER BY created"
RUN_BY_SPEC = f"SELECT {rows.RUN} FROM run WHERE spec = ? ORDER BY created DESC, id DESC LIMIT ?"
MAX_EQUAL = 20  # newest ones; older measurements of the same spec say nothing new


def share(path: Path, run_ids: Sequence[str], *, wanted: bool) -> None:
    """Show runs to the class, or keep them from it again."""
    statement = (
        "INSERT INTO shared (run, since) VALUES (:run, :now) ON CONFLICT DO NOTHING"
        if wanted
        else "DELETE FROM shared WHERE run = :run"
    )
    rows_of = [{"run": run_id, "now": time.time()} for run_id in run_ids]
    connection = db.open_for_writing(path)
    with contextlib.closing(connection), db.translated(path), db.transaction(connection):
        connection.executemany(statement, rows_of)


def shared(path: Path) -> frozenset[str]:
    """Ids of the runs that the class may look at; empty where there is no store."""
    if not path.exists():
        return frozenset()
    with _opened(path) as connection:
        return frozenset(row[0] for row in connection.execute("SELECT run FROM shared"))


def active(path: Path) -> list[RunInfo]:
    """Runs that wait or work now, oldest first."""
    if not path.exists():
        return []
    with _opened(path) as connection:
        found = map(rows.run_info, connection.execute(RUN_BY_STATE).fetchall())
        return [run for run in found if run.state.is_active]


def of_spec(path: Path, spec: RunSpec) -> list[RunInfo]:
    """Runs that were asked for exactly so, newest first."""
    if not path.exists():
        return []
    with _opened(path) as connection:
        found = connection.execute(RUN_BY_SPEC, (codec.to_json(spec), MAX_EQUAL)).fetchall()
        return [rows.run_info(row) for row in found]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(db.open_for_reading(path)) as connection, db.translated(path):
        yield connection
