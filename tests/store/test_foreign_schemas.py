"""A store from elsewhere holds our tables and indexes, or it is refused before it is asked."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from ampscope.errors import StoreError
from ampscope.store import db
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
    "an index of an expression": "CREATE INDEX slow ON run (hex(zeroblob(450000000)));",
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
    """Blanks, comments and the order of columns: as conversions leave them, or another SQLite."""
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


def test_a_value_is_no_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    script_stores.no_fault(path)
    for connection in (db.open_for_reading(path), db.open_for_writing(path)):
        with closing(connection), pytest.raises(sqlite3.DataError, match="too big"):
            connection.execute("SELECT zeroblob(?)", (db.LONGEST_VALUE + 1,)).fetchone()
