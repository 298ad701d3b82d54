"""A store from elsewhere holds our tables and indexes, or it is refused before it is asked."""

from __future__ import annotations

import itertools
import sqlite3
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ampscope.errors import StoreError
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Role
from ampscope.store import db, frames
from ampscope.store.merging import merge
from ampscope.store.reader import Reader
from tests.helpers import script_stores

ENDLESS = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "
CHANGES = {
    "an endless view": "ALTER TABLE run RENAME TO old; CREATE VIEW run AS "
    f"{ENDLESS} i AS id, '' AS spec, '' AS state, i AS created FROM n;",
    "a view of large texts": "ALTER TABLE run RENAME TO old; CREATE VIEW run AS "
    "SELECT id, hex(zeroblob(450000000)) AS spec FROM old;",
    "a generated column": "ALTER TABLE event ADD COLUMN more TEXT AS (hex(zeroblob(450000000)));",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON run BEGIN DELETE FROM run; END;",
    "an index of an expression": "CREATE INDEX slow ON shared (hex(zeroblob(450000000)));",
    "a check": "ALTER TABLE event RENAME TO old; CREATE TABLE event (run TEXT NOT NULL, "
    "seq INTEGER NOT NULL CHECK (length(hex(zeroblob(450000000))) > 0), PRIMARY KEY (run, seq));",
    "a table of its own": "CREATE TABLE more (a);",
    "a thousand tables": "".join(f"CREATE TABLE t{n} (a);" for n in range(1000)),
}


def foreign(path: Path, sql: str) -> Path:
    script_stores.no_fault(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA legacy_alter_table = ON")  # views are left as they are
        connection.executescript(sql)
    return path


@pytest.mark.parametrize("change", CHANGES)
def test_another_schema_is_refused_in_one_sentence(change: str, tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.db", CHANGES[change])
    began = time.perf_counter()
    for use in (
        lambda: Reader(path).runs(),
        lambda: list(merge([path], tmp_path / "into.db")),
        lambda: db.open_for_writing(path),
    ):
        with pytest.raises(StoreError, match="no table or index of ampscope's") as refused:
            use()
        assert str(refused.value).isprintable()
    assert time.perf_counter() - began < 5


def test_a_schema_in_other_letters_is_ours(tmp_path: Path) -> None:
    """Blanks, comments and the order of columns: as another SQLite leaves them."""
    path = tmp_path / "a.db"
    text = db.schema_text().replace("REAL,  ", "real /* of either */,", 1).replace(" (run", "(run")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(text)
        connection.execute(f"PRAGMA user_version = {db.SCHEMA_VERSION}")
        connection.execute("ANALYZE")
    with Reader(path) as reader:
        assert reader.runs() == []


def test_a_question_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a store of ours, whose pages may still lead around in a circle."""
    path = tmp_path / "a.db"
    script_stores.no_fault(path)
    monkeypatch.setattr(db, "LONGEST_QUERY_S", 0.2)
    with Reader(path) as reader:
        assert reader.runs()
        with pytest.raises(StoreError, match="longer than its size allows"):
            reader._all(f"{ENDLESS} max(i) FROM n")
        assert reader.runs()


COUNT_TO = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {}) SELECT i"


@pytest.fixture
def hurried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """A store's connection with a deadline of 0.2 s, which is looked at at every step."""
    script_stores.no_fault(tmp_path / "a.db")
    monkeypatch.setattr(db, "_BETWEEN", 1)
    with closing(db.open_for_reading(tmp_path / "a.db")) as connection:
        assert isinstance(connection, db._Reading)
        connection.longest_s = 0.2
        yield connection


def _busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("wait", [time.sleep, _busy])
def test_what_is_done_between_two_rows_is_not_the_stores(
    wait: Callable[[float], None], hurried: sqlite3.Connection
) -> None:
    """Rows are written elsewhere as they come, each way in which they can be asked for."""
    cursor = hurried.execute(f"{COUNT_TO.format(9)} FROM n")
    found = []
    for ask in (lambda: [cursor.fetchone()], lambda: cursor.fetchmany(2), lambda: [next(cursor)]):
        wait(0.15)
        found += ask()
    wait(0.15)
    for row in cursor:
        wait(0.05)
        found.append(row)
        if len(found) == 7:
            break
    assert [*found, *cursor.fetchall()] == [(n,) for n in range(1, 10)]


def test_a_stopped_process_is_not_the_stores(hurried: sqlite3.Connection) -> None:
    """Ctrl-Z in the midst of an answer, as a function that sleeps."""
    hurried.create_function("stopped", 0, lambda: time.sleep(0.4) or 1)
    assert hurried.execute("SELECT stopped() + abs(-1)").fetchall() == [(2,)]


def test_threads_have_deadlines_of_their_own(hurried: sqlite3.Connection) -> None:
    """A thread that has computed for longer asks the same connection."""
    cursor = hurried.execute(f"{COUNT_TO.format(2000)} FROM n")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_busy, 0.3).result()
        for ask in (cursor.fetchone, lambda: pool.submit(cursor.fetchone).result()) * 2:
            assert ask()
        assert pool.submit(lambda: len(hurried.execute("SELECT id FROM run").fetchall())).result()
    assert len(cursor.fetchall()) == 1996


def test_rows_without_end_have_a_deadline(hurried: sqlite3.Connection) -> None:
    """All rows of an answer together."""
    began = time.thread_time()
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        for _ in hurried.execute(f"{ENDLESS} i FROM n"):
            pass
    assert time.thread_time() - began < 5


def test_frames_that_lead_around_in_a_circle_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    script_stores.no_fault(path)
    blob = frames.pack((), (), np.zeros((0, RAW_LEN), np.int64))
    with Reader(path) as reader:
        circle = itertools.cycle([(1, 1.0, blob, None), (2, 1.0, blob, None)])
        with monkeypatch.context() as patch:
            patch.setattr(reader, "_connection", Namespace(execute=lambda *_: circle))
            found = reader.frames("a", Role.WEIGHT)
            assert [next(found).step, next(found).step] == [1, 2]
            with pytest.raises(StoreError, match="damaged"):
                next(found)


def test_a_value_is_no_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    script_stores.no_fault(path)
    for connection in (db.open_for_reading(path), db.open_for_writing(path)):
        with closing(connection), pytest.raises(sqlite3.DataError, match="too big"):
            connection.execute("SELECT zeroblob(?)", (db.LONGEST_VALUE + 1,)).fetchone()
