"""Open the store: one SQLite file, WAL, one writer per run, readers read-only.

A new store appears under its name with its schema in it, or not at all: a process that sees the
file may open it at once, as the dashboard does while the first run starts. Until a first release
nothing is converted: another version's schema, another program's database and an empty file are
refused. Each refusal, like a read-only folder or a full disk, is one StoreError sentence that names
the file and says what to do.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sqlite3
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from ampscope.errors import StoreBusy, StoreError
from ampscope.store import codec

BUSY_TIMEOUT_MS = 30_000  # a flush of a long run on a slow disk takes well under a second
_HEADER_BYTES = 100  # sqlite.org/fileformat.html
READING_TIMEOUT_MS = 3_000  # a person waits for what is read
LONGEST_QUERY_S = 20.0  # of processor time, and a second more for each megabyte of the store
LONGEST_VALUE = 128 * 2**20  # bytes of a text, a blob or a row; in a larger store its size
_BETWEEN = 10_000  # steps of SQLite between two looks at the clock
SCHEMA_VERSION = 7
_OUR_TABLES = {"run", "step", "module"}  # other programs number theirs, too
BESIDE = ("-wal", "-shm", "-journal")  # what SQLite keeps beside a file that is in use


def default_path() -> Path:
    """``AMPSCOPE_STORE``, else ``$XDG_DATA_HOME/ampscope/runs.db`` (``~/.local/share``)."""
    if chosen := os.environ.get("AMPSCOPE_STORE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "ampscope" / "runs.db"


def open_for_writing(
    path: Path, journal: str = "WAL", wait_ms: int = BUSY_TIMEOUT_MS
) -> sqlite3.Connection:
    """Connection in autocommit mode (transactions are explicit); creates file and schema. It waits
    ``wait_ms`` for another program that holds the file. A file
    that is there already keeps its ``journal``. WAL needs memory that all its processes share, so
    on a network file system a file has the journal DELETE (sqlite.org/wal.html)."""
    with translated(path):
        make_folder(path.parent)
        if not path.exists():
            create(path, journal)
        _check_files(path)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.text_factory = codec.decoded
        with _closed_on_error(connection):
            _restrain(connection, path)
            connection.execute(f"PRAGMA busy_timeout = {wait_ms}")
            if check(connection, path, may_be_empty=True) == 0:
                _set_journal(connection, journal, wait_ms)
            # WAL with NORMAL survives the death of the process at any instant; only a power cut
            # can take the last transactions (sqlite.org/pragma.html#pragma_synchronous).
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            prepare(connection)
    return connection


def make_folder(folder: Path) -> None:
    """``folder`` and those above it, as far as they are missing: for their owner alone. A folder
    that is there keeps its permissions."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def create(path: Path, journal: str) -> None:
    """Make ``path``, unless another process did so first.

    It is left to its first opening where a file cannot have two names (FAT, some network file
    systems): a move could replace what another process has written by then. And where the log of
    a deleted store lies there: SQLite drops it beside an empty file, and would play it into ours.
    """
    if any(Path(f"{path}{suffix}").exists() for suffix in BESIDE):
        return
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))  # SQLite's files follow
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute(f"PRAGMA journal_mode = {journal}")  # stays with the file
            prepare(connection)
        with contextlib.suppress(OSError):
            os.link(new, path)
    finally:
        for suffix in ("", *BESIDE):
            Path(f"{new}{suffix}").unlink(missing_ok=True)


def _set_journal(connection: sqlite3.Connection, journal: str, wait_ms: int) -> None:
    """The change to WAL alone does not wait for another process that makes it at the same moment:
    it fails at once, whatever the busy timeout says."""
    deadline = time.monotonic() + wait_ms / 1000
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {journal}")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Read-only connection. Raises StoreError where ``path`` is no store of this version."""
    with translated(path):
        if not path.exists():
            raise StoreError(
                f"There is no store at {path} yet. Run a probe first: ampscope probe gpt"
            )
        _check_files(path)
        _restore(path)
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{_reading_mode(path)}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            factory=_Reading,
        )
        with _closed_on_error(connection):
            connection.limit(path)
            _restrain(connection, path)
            connection.text_factory = codec.decoded
            connection.execute(f"PRAGMA busy_timeout = {READING_TIMEOUT_MS}")
            check(connection, path, may_be_empty=False)
    return connection


def _restore(path: Path) -> None:
    """Undo the transaction in which a process was killed that wrote to a file with the journal
    DELETE: SQLite does so at the first read, which a read-only connection may not (WAL has no such
    step). A journal that is in use by a living process is left to it."""
    if Path(f"{path}-journal").exists():
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA busy_timeout = {READING_TIMEOUT_MS}")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _reading_mode(path: Path) -> str:
    """Even a reader of a WAL database writes its -shm file. Where the folder forbids that and
    no process has the store open, it is read as a file that does not change
    (sqlite.org/wal.html#read_only_databases)."""
    is_open = Path(f"{path}-wal").exists()
    return "mode=ro" if is_open or os.access(path.parent, os.W_OK) else "mode=ro&immutable=1"


class _OfThread(threading.local):
    deadline = math.inf  # in processor time of the thread, while it is in SQLite


_of_thread = _OfThread()


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    def within_time(self: _Answer, *args: Any) -> Any:
        began = time.thread_time()
        _of_thread.deadline = began + self.left_s
        try:
            return method(self, *args)
        finally:
            _of_thread.deadline = math.inf
            self.left_s -= time.thread_time() - began

    return within_time


class _Answer(sqlite3.Cursor):
    """Counts the processor time that its rows take in SQLite: not what is done between two of
    them, nor how long a stopped process or a slow disk waits."""

    left_s = math.inf
    execute = _counted(sqlite3.Cursor.execute)
    fetchone = _counted(sqlite3.Cursor.fetchone)
    fetchmany = _counted(sqlite3.Cursor.fetchmany)
    fetchall = _counted(sqlite3.Cursor.fetchall)
    __next__ = _counted(sqlite3.Cursor.__next__)


class _Reading(sqlite3.Connection):
    """A connection whose every query ends in the time that the store's size allows: pages of a
    file can lead around in a circle."""

    longest_s = math.inf

    def limit(self, path: Path) -> None:
        """From here on."""
        self.longest_s = LONGEST_QUERY_S + path.stat().st_size / 1e6
        self.set_progress_handler(lambda: time.thread_time() > _of_thread.deadline, _BETWEEN)

    def execute(self, *args: Any) -> sqlite3.Cursor:
        """As of any connection."""
        answer = self.cursor(_Answer)
        answer.left_s = self.longest_s
        answer.execute(*args)
        return answer


def _check_files(path: Path) -> None:
    """Raises StoreError for what SQLite would wait on for ever (a named pipe, a device), also where
    it stands for a file beside the store.

    Nothing here may open the files: closing one drops the locks of every connection that this
    process has to it (sqlite.org/howtocorrupt.html, POSIX advisory locks). Another process that
    closes the store then takes itself for the last, deletes the log, and what this one writes from
    there on is in a file without a name.
    """
    for file in (path, *(Path(f"{path}{suffix}") for suffix in BESIDE)):
        try:
            mode = file.stat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode) and not (file == path and stat.S_ISDIR(mode)):
            kind = _KINDS.get(stat.S_IFMT(mode), "something else")
            raise StoreError(f"{file} is {kind}, not a file. Choose another file with --store.")


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def _restrain(connection: sqlite3.Connection, path: Path) -> None:
    """The file may come from elsewhere: its schema calls nothing that acts, and no value is longer
    than the file, whatever its pages say."""
    connection.execute("PRAGMA trusted_schema = OFF")
    longest = max(LONGEST_VALUE, path.stat().st_size)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(longest, 2**31 - 1))


@contextlib.contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


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


def schema_text() -> str:
    """The commented schema: the store's documentation."""
    return resources.files("ampscope.store").joinpath("schema.sql").read_text(encoding="utf-8")


def version_of(connection: sqlite3.Connection) -> int:
    """0 for a file in which there is nothing yet."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def prepare(connection: sqlite3.Connection) -> None:
    """Create the schema in an empty file, in one transaction."""
    if version_of(connection) == SCHEMA_VERSION:
        return
    with transaction(connection):
        if version_of(connection) == SCHEMA_VERSION:  # another process was faster
            return
        for statement in re.sub(r"--.*", "", schema_text()).split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def check(connection: sqlite3.Connection, path: Path, *, may_be_empty: bool) -> int:
    """The file's version: ours, or 0 for an empty file. Raises StoreError for others."""
    connection.execute("BEGIN")  # one view for both: another process may be creating the schema
    version = version_of(connection)
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    strange = _first_strange(connection)
    connection.execute("COMMIT")
    if version == SCHEMA_VERSION and tables >= _OUR_TABLES:
        if strange:
            raise StoreError(
                f"{path} is not used: {strange[:80]!r} in it is no table or index of ampscope's. "
                "Choose another file with --store."
            )
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


_OF_ANALYZE = (
    "CREATE TABLE sqlite_stat1(tbl,idx,stat);CREATE TABLE sqlite_stat4(tbl,idx,neq,nlt,ndlt,sample)"
)
_WORD = re.compile(r"'[^']*'|\"[^\"]*\"|\w+|[^\w\s]")
_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_STEPS = {"(": 1, ")": -1}
_Definition = tuple[str, frozenset[str], str]  # CREATE … NAME; columns and keys; what follows them


def _first_strange(connection: sqlite3.Connection) -> str:
    """Name of the first part of the schema that is not ours; "" where there is none. What a file
    holds is read only where its schema is ours: a view, a trigger, a generated column or an index
    of an expression computes whatever its author wrote. A table is compared as the set of its
    columns and keys."""
    known = _definitions(f"{schema_text()};{_OF_ANALYZE}")
    for kind, name, table, sql in connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master"
    ):
        if sql is None:  # of a primary key
            if kind == "index" and f"create table {table}" in known:
                continue
            return str(name)
        head, parts, end = _definition(sql)
        ours = known.get(head)
        if ours is None or parts != ours[1] or end != ours[2] or kind not in ("table", "index"):
            return str(name)
        if head != f"create {kind} {name}" and not head.startswith(f"create index {name} on "):
            return str(name)
    return ""


@functools.lru_cache(maxsize=4)
def _definitions(text: str) -> dict[str, _Definition]:
    statements = map(_definition, _COMMENT.sub("", text).split(";"))
    return {found[0]: found for found in statements}


@functools.lru_cache(maxsize=256)
def _definition(sql: str) -> _Definition:
    words = _WORD.findall(_COMMENT.sub("", sql).lower())
    begin = words.index("(") if "(" in words else len(words)
    parts: list[list[str]] = [[]]
    depth, end = 1, begin + 1
    while end < len(words) and (depth := depth + _STEPS.get(words[end], 0)):
        if words[end] == "," and depth == 1:
            parts.append([])
        else:
            parts[-1].append(words[end])
        end += 1
    return " ".join(words[:begin]), frozenset(map(" ".join, parts)), " ".join(words[end + 1 :])


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of a block's statements, or none: takes the write lock at once, and is rolled back when
    the block raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


_PLACEHOLDER = re.compile(r"\?(\d*)")


def in_order(sql: str, values: tuple[object, ...]) -> tuple[str, tuple[object, ...]]:
    """``sql`` with plain placeholders in place of numbered ones, and a value for each: Python from
    3.14 on takes a number for a name. A plain one has the number after the largest before it."""
    if not re.search(r"\?\d", sql):
        return sql, values
    numbers: list[int] = []
    for written in _PLACEHOLDER.findall(sql):
        numbers.append(int(written) if written else max(numbers, default=0) + 1)
    return _PLACEHOLDER.sub("?", sql), tuple(values[number - 1] for number in numbers)


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's and the system's errors into one StoreError sentence."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        kind = StoreBusy if is_locked(error) else StoreError
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


def is_locked(error: BaseException) -> bool:
    """Whether another program holds the file: what was to be written can be written later."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _sentence(path: Path, error: sqlite3.DatabaseError) -> str:
    text = str(error)
    if path.is_dir():
        return (
            f"{path} is a folder, not a store. If it holds the files of a training's ranks, "
            f"merge them first: ampscope runs merge --trust {path} --into runs.db. Or choose a "
            "file with --store."
        )
    if "not a database" in text:
        return f"{path} is not an ampscope store (not SQLite). Choose another file with --store."
    if "readonly" in text or "read-only" in text:
        return f"{path} is read-only. Choose another file with --store, or change its permissions."
    if "full" in text:
        return f"The disk that holds {path} is full. Free some space; what was kept is readable."
    if "unable to open" in text:
        return f"Cannot open {path}: no permission. Choose another file with --store."
    if "interrupted" in text:
        return (
            f"{path} is damaged: an answer took longer than its size allows. Restore it, or choose "
            "another file with --store."
        )
    if "malformed" in text:
        return f"{path} is damaged ({text}). Restore it, or choose another file with --store."
    if is_locked(error):
        return (
            f"{path} is held by another program. Wait until it is done, or end it (`fuser {path}` "
            "names it)."
        )
    return f"The store {path} failed: {text}. Choose another file with --store."
