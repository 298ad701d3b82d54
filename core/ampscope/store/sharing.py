"""What a class needs of a store: which runs it may look at, and which are equal to a request.

Read anew at every call. Two browsers that ask for the same thing at the same moment must both see a
run that was registered just now.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from ampscope.records import RunInfo, RunSpec
from ampscope.store import codec, db, rows
from ampscope.store.reader import Reader

BY_SPEC = f"SELECT {rows.RUN} FROM run WHERE spec = ? ORDER BY created DESC, id DESC LIMIT ?"
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
    with Reader(path) as reader:
        return frozenset(row[0] for row in reader._all("SELECT run FROM shared"))


def active(path: Path) -> list[RunInfo]:
    """Runs that wait or work now, oldest first; none where there is no store."""
    if not path.exists():
        return []
    with Reader(path) as reader:
        return reader.active()


def of_spec(path: Path, spec: RunSpec) -> list[RunInfo]:
    """Runs that were asked for exactly so, newest first; none where there is no store."""
    if not path.exists():
        return []
    with Reader(path) as reader:
        return [rows.run_info(r) for r in reader._all(BY_SPEC, codec.to_json(spec), MAX_EQUAL)]
