"""A new store appears under its name with its schema in it, or not at all.

Whoever sees the file may open it at once: the dashboard looks for it while the first run starts.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import uuid
from pathlib import Path

from ampscope.store import schema

BESIDE = ("-wal", "-shm", "-journal")  # what SQLite keeps beside a file that is in use


def make_folder(folder: Path) -> None:
    """``folder`` and those above it, as far as they are missing: for their owner alone. A folder
    that is there keeps its permissions."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def create(path: Path, journal: str) -> None:
    """Make ``path``, unless somebody did so first.

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
            schema.prepare(connection)
        with contextlib.suppress(OSError):
            os.link(new, path)
    finally:
        for suffix in ("", *BESIDE):
            Path(f"{new}{suffix}").unlink(missing_ok=True)
