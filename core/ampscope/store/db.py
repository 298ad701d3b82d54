"""Open the store: one SQLite file, WAL, one writer a run, readers read-only.

A file that is not SQLite, a schema of another version, a read-only folder and a full disk each end
in one StoreError sentence that names the file and says what to do.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ampscope.errors import StoreBusy, StoreError
from ampscope.store import creation, door, schema
from ampscope.store.schema import SCHEMA_VERSION, schema_text
from ampscope.store.transactions import transaction

__all__ = [
    "SCHEMA_VERSION",
    "default_path",
    "open_for_reading",
    "open_for_writing",
    "schema_text",
    "transaction",
    "translated",
]

BUSY_TIMEOUT_MS = 30_000  # a flush of a long run on a slow disk takes well under a second
_HEADER_BYTES = 100  # sqlite.org/fileformat.html
READING_TIMEOUT_MS = 3_000  # a person waits for what is read


def default_path() -> Path:
    """``AMPSCOPE_STORE``, else ``$XDG_DATA_HOME/ampscope/runs.db`` (``~/.local/share``)."""
    if chosen := os.environ.get("AMPSCOPE_STORE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "ampscope" / "runs.db"


def open_for_writing(path: Path, journal: str = "WAL") -> sqlite3.Connection:
    """Connection in autocommit mode (transactions are explicit); creates file and schema. A file
    that is there already keeps its ``journal``. WAL needs memory that all its processes share, so
    on a network file system a file has the journal DELETE (sqlite.org/wal.html)."""
    with translated(path):
        creation.make_folder(path.parent)
        if not path.exists():
            creation.create(path, journal)
        _check_files(path)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.text_factory = door.decoded
        with _closed_on_error(connection):
            connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            if schema.check(connection, path, may_be_empty=True) == 0:
                _set_journal(connection, journal)
            # WAL with NORMAL survives the death of the process at any instant; only a power cut
            # can take the last transactions (sqlite.org/pragma.html#pragma_synchronous).
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            schema.prepare(connection)
    return connection


def _check_files(path: Path) -> None:
    """Raises StoreError for what SQLite would wait on for ever (a named pipe, a device), also where
    it stands for a file beside the store.

    Nothing here may open the files: closing one drops the locks of every connection that this
    process has to it (sqlite.org/howtocorrupt.html, POSIX advisory locks). Another process that
    closes the store then takes itself for the last, deletes the log, and what this one writes from
    there on is in a file without a name.
    """
    for file in (path, *(Path(f"{path}{suffix}") for suffix in creation.BESIDE)):
        try:
            mode = file.stat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode) and not (file == path and stat.S_ISDIR(mode)):
            raise StoreError(
                f"{file} is {_kind(mode)}, not a file. Choose another file with --store."
            )


def is_database(path: Path) -> bool:
    """Whether a file is SQLite's. It is asked for its first page without being opened beside it:
    see :func:`_check_files`."""
    if path.stat().st_size < _HEADER_BYTES:
        return False
    where = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(where, uri=True)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.DatabaseError as error:
        return error.sqlite_errorcode != sqlite3.SQLITE_NOTADB
    return True


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFDIR: "a folder",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _set_journal(connection: sqlite3.Connection, journal: str) -> None:
    """The change to WAL alone does not wait for another process that makes it at the same moment:
    it fails at once, whatever the busy timeout says."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {journal}")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def open_for_reading(path: Path, *, may_convert: bool = True) -> sqlite3.Connection:
    """Read-only connection; a file of an older version is converted first, if that is possible and
    allowed. Raises StoreError when there is no store at ``path``."""
    with translated(path):
        if not path.exists():
            raise StoreError(
                f"There is no store at {path} yet. Run a probe first: ampscope probe gpt"
            )
        _check_files(path)
    _restore(path)
    connection, version = _reading(path)
    if version == SCHEMA_VERSION:
        return connection
    connection.close()
    if not may_convert:
        raise schema.must_convert(path, version, "is not converted here")
    try:
        open_for_writing(path).close()  # converts it
    except StoreError as error:
        raise schema.must_convert(path, version) from error
    return _reading(path)[0]


def _restore(path: Path) -> None:
    """Undo the transaction in which a process was killed that wrote to a file with the journal
    DELETE: SQLite does so at the first read, which a read-only connection may not (WAL has no such
    step). A journal that is in use by a living process is left to it."""
    if Path(f"{path}-journal").exists():
        with translated(path), contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA busy_timeout = {READING_TIMEOUT_MS}")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _reading(path: Path) -> tuple[sqlite3.Connection, int]:
    """Read-only connection, and the version of the file."""
    with translated(path):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{_reading_mode(path)}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
        with _closed_on_error(connection):
            connection.text_factory = door.decoded
            connection.execute(f"PRAGMA busy_timeout = {READING_TIMEOUT_MS}")
            version = schema.check(connection, path, may_be_empty=False)
    return connection, version


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
        kind = StoreBusy if _is_locked(error) else StoreError
        raise kind(_sentence(path, error)) from error
    except UnicodeDecodeError as error:  # SQLite quotes the file's bytes in its message
        raise StoreError(
            f"{path} is damaged (its texts are not UTF-8). Restore it, or choose another file with "
            "--store."
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(f"Cannot use {path}: {reason}. Choose another file with --store.") from (
            error
        )


def _is_locked(error: sqlite3.DatabaseError) -> bool:
    return "locked" in str(error)


def _sentence(path: Path, error: sqlite3.DatabaseError) -> str:
    text = str(error)
    if path.is_dir():
        return (
            f"{path} is a folder, not a store. If it holds the files of a training's ranks, "
            f"merge them first: ampscope runs merge {path} --into runs.db. Or choose a file with "
            "--store."
        )
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
    if _is_locked(error):
        return (
            f"{path} is held by another program. Wait until it is done, or end it (`fuser {path}` "
            "names it)."
        )
    return f"The store {path} failed: {text}. Choose another file with --store."
