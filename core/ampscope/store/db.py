"""Open the store: one SQLite file, WAL, one writer a run, readers read-only.

A file that is not SQLite, a schema of another version, a read-only folder and a full disk each end
in one StoreError sentence that names the file and says what to do.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sqlite3
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from ampscope.errors import StoreError

SCHEMA_VERSION = 1
_OUR_TABLES = {"run", "step", "module"}  # in every version; other programs number theirs 1 too
BUSY_TIMEOUT_MS = 30_000  # a flush of a long run on a slow disk takes well under a second


def default_path() -> Path:
    """``AMPSCOPE_STORE``, else ``$XDG_DATA_HOME/ampscope/runs.db`` (``~/.local/share``)."""
    if chosen := os.environ.get("AMPSCOPE_STORE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "ampscope" / "runs.db"


def schema_text() -> str:
    """The commented schema: the store's documentation."""
    return resources.files("ampscope.store").joinpath("schema.sql").read_text(encoding="utf-8")


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Connection in autocommit mode (transactions are explicit); creates file and schema."""
    with translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        with _closed_on_error(connection):
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            _check_version(connection, path, may_be_empty=True)
            connection.execute("PRAGMA journal_mode = WAL")
            # WAL with NORMAL survives the death of the process at any instant; only a power cut
            # can take the last transactions (sqlite.org/pragma.html#pragma_synchronous).
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            _create_schema(connection)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Read-only connection. Raises StoreError when there is no store at ``path``."""
    if not path.exists():
        raise StoreError(f"There is no store at {path} yet. Run a probe first: ampscope probe gpt")
    with translated(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{_reading_mode(path)}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
        with _closed_on_error(connection):
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            _check_version(connection, path, may_be_empty=False)
    return connection


def _reading_mode(path: Path) -> str:
    """Even a reader of a WAL database writes its -shm file. Where the folder forbids that and
    nobody has the store open, it is read as a file that does not change
    (sqlite.org/wal.html#read_only_databases)."""
    is_open = Path(f"{path}-wal").exists()
    return "mode=ro" if is_open or os.access(path.parent, os.W_OK) else "mode=ro&immutable=1"


@contextlib.contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's and the system's errors into one StoreError sentence."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StoreError(_sentence(path, error)) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(f"Cannot use {path}: {reason}. Choose another file with --store.") from (
            error
        )


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """One transaction; rolled back when the block raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def to_sql(value: float | None) -> float | str | None:
    """SQLite stores a REAL NaN as NULL, so NaN goes in as text."""
    return "nan" if value is not None and math.isnan(value) else value


def from_sql(value: float | str | None) -> float | None:
    """Inverse of :func:`to_sql`."""
    return None if value is None else float(value)


def _create_schema(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
        return
    with transaction(connection):
        # Another process may have created it between the check and the lock.
        if connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION:
            return
        for statement in re.sub(r"--.*", "", schema_text()).split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _check_version(connection: sqlite3.Connection, path: Path, *, may_be_empty: bool) -> None:
    connection.execute("BEGIN")  # one view for both: another process may be creating the schema
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    connection.execute("COMMIT")
    if version == SCHEMA_VERSION and tables >= _OUR_TABLES:
        return
    if version == 0 and not tables:
        if may_be_empty:
            return
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


def _sentence(path: Path, error: sqlite3.DatabaseError) -> str:
    text = str(error)
    if path.is_dir():
        return f"{path} is a folder. Choose a file with --store."
    if "Could not decode" in text:
        return f"{path} is damaged (a text in it is unreadable). Choose another file with --store."
    if "not a database" in text:
        return f"{path} is not an ampscope store (not SQLite). Choose another file with --store."
    if "readonly" in text or "read-only" in text:
        return f"{path} is read-only. Choose another file with --store, or change its permissions."
    if "full" in text:
        return f"The disk that holds {path} is full. Free some space; what was kept is readable."
    if "unable to open" in text:
        return f"Cannot open {path}: no permission. Choose another file with --store."
    if "malformed" in text:
        return f"{path} is damaged ({text}). Restore it, or choose another file with --store."
    if "locked" in text:
        return f"{path} is held by another program for longer than {BUSY_TIMEOUT_MS // 1000} s."
    return f"The store {path} failed: {text}. Choose another file with --store."
