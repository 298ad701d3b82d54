"""Copy runs of several stores into one: those of the ranks of a training, or of several machines.

Runs keep their ids. Each run is one transaction, so a merge that is interrupted can be repeated: a
run that is there already with the same content is passed over. Sources are only read.

Without trust the runs become imported ones: looked at, and never run again from here, because their
script and its arguments come from an untrusted file. Their groups get names of their own, the same
at each merge: ranks of several stores stay together, and no run joins a diagnosis that is there.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from ampscope.errors import BadInput, StoreError
from ampscope.record_json import quoted
from ampscope.store import codec, db

# What may change without the run being another one: a reader's request, a beat of the heart.
_NOT_CONTENT = {"cancel", "heartbeat"}
_NOT_OF_THE_RUN = {"shared"}  # whom it is shown to is decided anew in each store
_GROUP = "imported-"  # before the name of a group from an untrusted store


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of one run of one source."""

    run_id: str
    source: Path
    was_there: bool


def stores_in(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant: a folder stands for every ``*.db`` in it. Raises BadInput where
    there is none."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.db")) if path.is_dir() else [path]
        if not inside:
            raise BadInput(f"There is no store (*.db) in the folder {path}.")
        found += inside
    return list(dict.fromkeys(found))


def merge(sources: Sequence[Path], into: Path, *, trust: bool = False) -> Iterator[Merged]:
    """Copy every run of the sources, one after the other; with ``trust`` as runs that were recorded
    here, also those that are there as imported from an earlier merge. All sources are checked
    before the first run is copied. Raises StoreError for a store that cannot be read or is damaged,
    and for a run that is there already with other content."""
    others = [source for source in sources if source.resolve() != into.resolve()]
    for source in others:
        with contextlib.closing(_checked(source)):
            pass
    target = db.open_for_writing(into)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    with contextlib.closing(target):
        for source in others:
            mark = "" if trust else f"{source.name} on {when}"
            with contextlib.closing(db.open_for_reading(source)) as origin:
                with db.translated(source):
                    ids = [row[0] for row in origin.execute("SELECT id FROM run ORDER BY created")]
                known = frozenset(ids)
                for run_id in ids:
                    with db.translated(into):
                        was_there = _copy(origin, target, run_id, source, into, mark, known)
                        yield Merged(run_id, source, was_there)


def _checked(source: Path) -> sqlite3.Connection:
    """Read-only connection to a whole file of our version."""
    connection = db.open_for_reading(source)
    try:
        with db.translated(source):
            answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            ids = [row[0] for row in connection.execute("SELECT id FROM run")]
    except StoreError:
        connection.close()
        raise
    if answer != "ok":
        connection.close()
        raise StoreError(f"{source} is damaged ({answer}). Nothing of it was copied.")
    if (strange := next((x for x in ids if not codec.is_run_id(x)), None)) is not None:
        connection.close()
        raise StoreError(
            f"{source} is damaged (the id {quoted(strange)} of a run is not 12 hexadecimal "
            "digits). Nothing of it was copied."
        )
    return connection


def _copy(
    origin: sqlite3.Connection, target: sqlite3.Connection, run_id: str, source: Path, into: Path,
    mark: str, ids: Set[str],
) -> bool:  # fmt: skip
    """True when the run was there already. ``mark`` says where it comes from, empty for a store
    that is trusted; ``ids`` are the source's runs."""
    origin.execute("BEGIN")  # one view of a run that may still be written
    try:
        with db.transaction(target):
            known = target.execute("SELECT 1 FROM run WHERE id=?", (run_id,)).fetchone()
            if known is None:
                for table in _tables(target):
                    _copy_table(origin, target, table, run_id)
                if mark:
                    _set_spec(target, run_id, _marked(_spec(origin, run_id), mark, ids))
                return False
            if not _same(origin, target, run_id, ids):
                raise StoreError(
                    f"Run {run_id} of {source} is in {into} already with other content. Delete "
                    f"it there (ampscope runs delete {run_id} --store {into}), or merge into a new "
                    "file."
                )
            if not mark:
                _set_spec(target, run_id, _spec(origin, run_id))
            return True
    except sqlite3.DataError as error:  # beyond what a connection lets through
        raise StoreError(
            f"{source} is damaged (a value of run {run_id} is larger than any that ampscope "
            "writes). Nothing of this run was copied."
        ) from error
    finally:
        origin.execute("COMMIT")


def _spec(connection: sqlite3.Connection, run_id: str) -> str:
    found: str = connection.execute("SELECT spec FROM run WHERE id=?", (run_id,)).fetchone()[0]
    return found


def _set_spec(target: sqlite3.Connection, run_id: str, spec: str) -> None:
    target.execute("UPDATE run SET spec=? WHERE id=?", (spec, run_id))


def _marked(text: str, mark: str, ids: Set[str]) -> str:
    """A run's spec as it is kept of an untrusted store. Raises StoreError where it is damaged."""
    spec = codec.spec_from_json(text)
    group = spec.group
    return codec.to_json(
        replace(
            spec,
            imported=spec.imported or mark,
            group=group if not group or group.startswith(_GROUP) else _GROUP + group,
            parent=spec.parent if spec.parent in ids else "",
        )
    )


def _copy_table(
    origin: sqlite3.Connection, target: sqlite3.Connection, table: str, run_id: str
) -> None:
    names = _columns(target, table)
    listed = ",".join(f'"{name}"' for name in names)
    rows = origin.execute(f"SELECT {listed} FROM {table} WHERE {_key(table)}=?", (run_id,))
    marks = ",".join("?" * len(names))
    target.executemany(f"INSERT INTO {table} ({listed}) VALUES ({marks})", rows)


def _same(
    origin: sqlite3.Connection, target: sqlite3.Connection, run_id: str, ids: Set[str]
) -> bool:
    """Row by row in the order of the primary keys; ends at the first difference."""
    ours, theirs = _spec(target, run_id), _spec(origin, run_id)
    if ours != theirs and ours != _marked(theirs, codec.spec_from_json(ours).imported, ids):
        return False
    for table in _tables(target):
        left_out = {*_NOT_CONTENT, "spec"} if table == "run" else _NOT_CONTENT
        names = [name for name in _columns(target, table) if name not in left_out]
        listed = ",".join(f'"{name}"' for name in names)
        order = ",".join(f'"{name}"' for name in _primary_key(target, table))
        sql = f"SELECT {listed} FROM {table} WHERE {_key(table)}=? ORDER BY {order}"
        rows, others = target.execute(sql, (run_id,)), origin.execute(sql, (run_id,))
        while (row := rows.fetchone()) == others.fetchone():
            if row is None:
                break
        else:
            return False
    return True


def _key(table: str) -> str:
    return "id" if table == "run" else "run"


def _tables(connection: sqlite3.Connection) -> list[str]:
    """The run first: the others refer to it."""
    sql = "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'"
    names = [row[0] for row in connection.execute(sql) if row[0] not in _NOT_OF_THE_RUN]
    return sorted(names, key=lambda name: name != "run")


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def _primary_key(connection: sqlite3.Connection, table: str) -> list[str]:
    key = [(row[5], row[1]) for row in connection.execute(f"PRAGMA table_info({table})") if row[5]]
    return [name for _, name in sorted(key)]
