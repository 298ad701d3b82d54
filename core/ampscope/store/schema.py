"""The store's schema: its text, its version, how a file gets it, how an older one is converted.

A file of an older version is converted in one transaction when it is first opened, by whoever may
write to it. A newer file, another program's database and an empty file are refused in one sentence.
"""

from __future__ import annotations

import re
import sqlite3
from importlib import resources
from pathlib import Path

from ampscope.errors import StoreError
from ampscope.store import pyramid
from ampscope.store.transactions import transaction

SCHEMA_VERSION = 5
OLDEST_VERSION = 1  # what can still be converted
_OUR_TABLES = {"run", "step", "module"}  # in every version; other programs number theirs 1 too
_CREATES = re.compile(r"CREATE (?:TABLE|INDEX) (\w+)")


def schema_text() -> str:
    """The commented schema: the store's documentation."""
    return resources.files("ampscope.store").joinpath("schema.sql").read_text(encoding="utf-8")


def version_of(connection: sqlite3.Connection) -> int:
    """0 for a file in which there is nothing yet."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def prepare(connection: sqlite3.Connection) -> None:
    """Create the schema in an empty file, or convert that of an older one: one transaction."""
    if version_of(connection) == SCHEMA_VERSION:
        return
    with transaction(connection):
        found = version_of(connection)
        if found == SCHEMA_VERSION:  # another process was faster, between the check and the lock
            return
        tables = _tables(connection)
        if found in (1, 2):
            connection.execute("ALTER TABLE step ADD COLUMN ended_at REAL")
        if found in (1, 2, 3, 4):
            connection.execute("ALTER TABLE step ADD COLUMN unclipped_norm REAL")
            connection.execute("ALTER TABLE shadow ADD COLUMN below_range INTEGER")
        for statement in re.sub(r"--.*", "", schema_text()).split(";"):
            name = _CREATES.search(statement)
            if name is not None and name[1] not in tables:
                if name[1] == "frame_span" and found == 1:
                    connection.execute("ALTER TABLE frame ADD COLUMN last_step INTEGER")
                connection.execute(statement)
        if found == 1:
            for run_id, steps in _steps_by_run(connection):
                pyramid.update(connection, run_id, steps)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def check(connection: sqlite3.Connection, path: Path, *, may_be_empty: bool) -> int:
    """The file's version, one that can be read or converted. Raises StoreError for others."""
    connection.execute("BEGIN")  # one view for both: another process may be creating the schema
    version, tables = version_of(connection), _tables(connection)
    connection.execute("COMMIT")
    if OLDEST_VERSION <= version <= SCHEMA_VERSION and tables >= _OUR_TABLES:
        return version
    if version == 0 and not tables:
        if may_be_empty:
            return version
        raise StoreError(f"{path} is an empty file. Run a probe first: ampscope probe gpt")
    if not tables >= _OUR_TABLES:
        raise StoreError(
            f"{path} is a database of another program, not an ampscope store. "
            "Choose another file with --store."
        )
    raise StoreError(
        f"{path} has schema version {version}; this ampscope reads version {SCHEMA_VERSION}. "
        "Use the ampscope that wrote it, or choose another file with --store."
    )


def must_convert(path: Path, version: int, why: str = "is read-only") -> StoreError:
    """What to say of an older file that is not written to."""
    return StoreError(
        f"{path} has schema version {version} and {why}; this ampscope reads version "
        f"{SCHEMA_VERSION}. Open it, or a copy in a folder that you may write to, with: ampscope "
        "runs list --store FILE"
    )


def _steps_by_run(connection: sqlite3.Connection) -> list[tuple[str, list[int]]]:
    """What a file holds."""
    runs = connection.execute("SELECT id FROM run").fetchall()
    sql = "SELECT step FROM step WHERE run=?"
    return [(run, [row[0] for row in connection.execute(sql, (run,))]) for (run,) in runs]


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
