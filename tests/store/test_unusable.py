"""Stores that cannot be used, each in one sentence; and one that can be read and not written."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ampscope.errors import StoreError
from ampscope.launcher.launch import launch
from ampscope.records import RunSpec, State, StepRecord
from ampscope.store import db
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from tests.helpers.child_runs import assert_one_sentence, command_line, read_only, run_command

GPT = RunSpec("gpt")


def another_version(path: Path) -> None:
    RunWriter.create(path, GPT).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {db.SCHEMA_VERSION + 1}")
    connection.close()


def another_program(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.execute(f"PRAGMA user_version = {db.SCHEMA_VERSION}")
    connection.commit()
    connection.close()


def truncated(path: Path) -> None:
    writer = RunWriter.create(path, GPT)
    writer.add_step(StepRecord(0))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


STORES = {
    "another version": (another_version, "has schema version"),
    "another program's": (another_program, "a database of another program"),
    "not SQLite": (lambda path: path.write_text("no database at all\n" * 99), "(not SQLite)"),
    "a folder": (lambda path: path.mkdir(), "a folder"),
    "below a file": (lambda path: path.parent.rmdir() or path.parent.write_text(""), "Cannot use"),
    "damaged": (truncated, "is damaged"),
}


@pytest.mark.parametrize("make", STORES)
def test_a_store_that_cannot_be_used(make: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.db"
    path.parent.mkdir()
    prepare, what = STORES[make]
    prepare(path)
    with pytest.raises(StoreError) as writing:
        launch(GPT, path)
    assert what in str(writing.value)
    done = run_command("probe", "gpt", "--store", path)
    assert_one_sentence(done, what)
    assert done.returncode == 2
    assert_one_sentence(run_command("runs", "list", "--store", path), str(path))


def test_a_store_that_is_not_there_yet(tmp_path: Path) -> None:
    done = run_command("runs", "list", "--store", tmp_path / "none.db")
    assert_one_sentence(done, "There is no store at")
    assert not (tmp_path / "none.db").exists()


def test_a_full_disk_keeps_what_was_flushed(tmp_path: Path) -> None:
    """SQLite's own limit on the size of the file raises the same error as a disk does."""
    path = tmp_path / "runs.db"
    writer = RunWriter.create(path, GPT)
    pages = writer._connection.execute("PRAGMA page_count").fetchone()[0]
    writer._connection.execute(f"PRAGMA max_page_count = {pages + 8}")
    step = 0
    with pytest.raises(StoreError, match="is full"):  # noqa: PT012  # which flush fails is open
        while step < 10_000:
            for _ in range(20):
                writer.add_step(StepRecord(step, loss=1.5, grad_norm=2.5))
                step += 1
            writer.flush()
    assert 20 < step < 10_000
    with Reader(path) as reader:
        assert [s.step for s in reader.steps(writer.run_id)] == list(range(step - 20))
    writer._connection.close()


def test_a_read_only_store_can_be_read_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "store" / "runs.db"
    writer = RunWriter.create(path, GPT)
    writer.finish(State.FINISHED)
    writer.close()
    if read_only(path.parent, ["true"]).returncode:
        pytest.skip("no user namespaces here to mount a folder read-only")
    listed = read_only(path.parent, command_line("runs", "list", "--store", path))
    assert listed.returncode == 0, listed.stderr
    assert writer.run_id in listed.stdout
    assert_one_sentence(
        read_only(path.parent, command_line("probe", "gpt", "--store", path)), str(path)
    )
    path.unlink()
    assert_one_sentence(
        read_only(path.parent, command_line("probe", "gpt", "--store", path)), str(path)
    )


def test_a_reader_in_the_writers_process_leaves_the_writers_locks_alone(tmp_path: Path) -> None:
    """Whoever opens and closes the store's file by itself drops all of this process's locks on it.
    Another process then deletes the log of the writer at work, and flushed steps with it."""
    store = tmp_path / "runs.db"
    writer = RunWriter.create(store, GPT)
    writer.add_step(StepRecord(0))
    writer.flush()
    with Reader(store) as reader:
        assert len(reader.steps(writer.run_id)) == 1
    other = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
        "c.execute('SELECT count(*) FROM run').fetchone(); c.close()"
    )
    subprocess.run([sys.executable, "-c", other, str(store)], check=True)
    assert Path(f"{store}-wal").exists()  # the last connection that closes deletes it
    writer.add_step(StepRecord(1))
    writer.flush()
    with Reader(store) as reader:
        assert len(reader.steps(writer.run_id)) == 2
    writer.close()
