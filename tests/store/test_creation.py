"""A new store: whole from its first instant, and never a mixture with a deleted one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.records import RunSpec
from ampscope.store import db
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

# Opens each file at the first moment at which it is there.
WAITS = """
import os, sys, time
from pathlib import Path
from ampscope.store import db
print("ready", flush=True)
for name in sys.argv[1:]:
    deadline = time.monotonic() + 60
    while not os.path.exists(name):
        assert time.monotonic() < deadline, name
    db.open_for_reading(Path(name)).close()
"""


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".new" in path.name]


def test_who_waits_for_the_file_can_open_it_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.db" for number in range(40)]
    command = [sys.executable, "-c", WAITS, *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "ready\n"
        for path in paths:
            db.open_for_writing(path).close()
        assert waiting.wait(60) == 0
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_the_journal_stays_with_the_file(journal: str, tmp_path: Path) -> None:
    db.open_for_writing(tmp_path / "s.db", journal).close()
    with contextlib.closing(db.open_for_reading(tmp_path / "s.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0].upper() == journal


def test_the_log_of_a_deleted_store_is_not_played_into_a_new_one(tmp_path: Path) -> None:
    """Somebody deletes a killed run's file and overlooks what lies beside it."""
    old, new = tmp_path / "old.db", tmp_path / "s.db"
    writer = RunWriter.create(old, RunSpec("gpt"))
    for suffix in ("-wal", "-shm"):
        shutil.copy(f"{old}{suffix}", f"{new}{suffix}")
    writer.close()
    created = RunWriter.create(new, RunSpec("mlp"))
    created.close()
    with Reader(new) as reader:
        assert [run.id for run in reader.runs()] == [created.run_id]


def test_where_a_file_cannot_have_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "s.db"
    RunWriter.create(path, RunSpec("gpt")).close()
    with Reader(path) as reader:
        assert len(reader.runs()) == 1
    assert left_over(tmp_path) == []
