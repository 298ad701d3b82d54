"""Stores of ranks and machines in one: nothing lost, nothing twice, nothing overwritten."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ampscope.errors import BadInput, StoreError
from ampscope.launcher.script_runs import repeatable
from ampscope.numerics.histogram import RAW_LEN
from ampscope.observations import Call
from ampscope.records import Event, Frame, Role, RunSpec, State, StepRecord
from ampscope.store import db, merging
from ampscope.store.merging import Merged, merge, stores_in
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter, delete_run
from tests.helpers import stores
from tests.helpers.child_runs import assert_one_sentence, run_command


def rank_run(folder: Path, rank: int, steps: int = 5, world: int = 2) -> RunWriter:
    spec = RunSpec("train.py", kind="watch", group="job 7", rank=rank, world=world)
    writer = RunWriter.create(f"{folder}/", spec)
    rows = np.zeros((1, RAW_LEN), np.int64)
    rows[0, 150] = 1 + rank
    for step in range(steps):
        writer.add_step(StepRecord(step, loss=float(rank), scale=2.0**step))
        writer.add_frame(Frame(step, Role.WEIGHT, (rank,), ("fp32",), rows))
        writer.add_event(Event(step, "note", "n", f"Step {step}."))
    writer.finish(State.FINISHED)
    writer.close()
    return writer


def dump(path: Path, run_id: str) -> dict[str, list[tuple[object, ...]]]:
    """Every row of a run in every table, straight from SQLite."""
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()
        return {
            name: sorted(
                connection.execute(
                    f"SELECT * FROM {name} WHERE {'id' if name == 'run' else 'run'}=?", (run_id,)
                ).fetchall(),
                key=str,
            )
            for (name,) in tables
        }


def test_a_folder_holds_one_file_a_rank_without_wal(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path):  # with a slash at the end; one that exists
        writer = rank_run(folder, 3)
        assert writer.path.parent == folder
        assert writer.path.name.endswith(f"-{os.getpid()}-rank3.db")
        with closing(sqlite3.connect(writer.path)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    with Reader(writer.path) as reader:
        assert len(reader.steps(writer.run_id)) == 5
    delete_run(writer.path, writer.run_id)  # opens it for writing once more
    with closing(sqlite3.connect(writer.path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    plain = RunWriter.create(tmp_path / "one.db", dataclasses.replace(RunSpec("t"), kind="watch"))
    plain.close()
    assert plain.path == tmp_path / "one.db"


def test_a_folder_as_store_says_how_to_merge_it(tmp_path: Path) -> None:
    rank_run(tmp_path / "ranks", 0)
    what = f"ampscope runs merge --trust {tmp_path / 'ranks'} --into runs.db"
    with pytest.raises(StoreError, match="is a folder, not a store"):
        Reader(tmp_path / "ranks")
    with pytest.raises(StoreError, match="is a folder"):
        RunWriter.create(tmp_path / "ranks", RunSpec("gpt"))  # a probe
    assert_one_sentence(run_command("runs", "list", "--store", tmp_path / "ranks"), what)


def test_ranks_are_merged_whole_and_once(tmp_path: Path) -> None:
    folder, into = tmp_path / "ranks", tmp_path / "runs.db"
    writers = [rank_run(folder, rank) for rank in range(2)]
    observed = RunWriter.create(tmp_path / "other.db", RunSpec("s.py", kind="script"))
    observed.add_observations([Call(0, 0, "update", value=2.0)])
    observed.close()
    probe = stores.finished(tmp_path / "other.db")
    sources = stores_in([folder, tmp_path / "other.db"])
    assert len(sources) == 3
    places = [(w.path, w.run_id) for w in (*writers, observed)]
    places.append((observed.path, probe))
    expected = {run_id: dump(path, run_id) for path, run_id in places}
    for was_there in (False, True):
        found = list(merge(sources, into, trust=True))
        assert {m.run_id for m in found} == set(expected)
        assert [m.was_there for m in found] == [was_there] * 4
    assert isinstance(found[0], Merged)
    for run_id, content in expected.items():
        assert all(content[name] == rows for name, rows in dump(into, run_id).items())
        assert content["run"]
    with Reader(into) as reader:
        group = reader.group("job 7")
        assert [info.spec.rank for info in group] == [0, 1]
        assert [len(reader.events(info.id)) for info in group] == [5, 5]


@pytest.mark.parametrize("table", ["step", "frame", "event"])
def test_a_run_with_other_content_is_refused_and_left(tmp_path: Path, table: str) -> None:
    writer = rank_run(tmp_path / "ranks", 0)
    into = tmp_path / "runs.db"
    list(merge([writer.path], into))
    with closing(sqlite3.connect(writer.path)) as connection:
        connection.execute(f"DELETE FROM {table} WHERE step=4")
        connection.commit()
    before = dump(into, writer.run_id)
    with pytest.raises(StoreError, match="already with other content"):
        list(merge([writer.path], into))
    assert dump(into, writer.run_id) == before


def test_a_damaged_source_stops_the_merge_before_it_begins(tmp_path: Path) -> None:
    good, bad = rank_run(tmp_path / "a", 0), rank_run(tmp_path / "b", 1, steps=500)
    content = bytearray(bad.path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 20_000] = b"\x07" * 20_000
    bad.path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        list(merge([good.path, bad.path], tmp_path / "runs.db"))
    assert not (tmp_path / "runs.db").exists()


def test_sources_are_not_written(tmp_path: Path) -> None:
    writer = rank_run(tmp_path / "ranks", 0)
    before = writer.path.read_bytes()
    list(merge([writer.path], tmp_path / "runs.db"))
    assert writer.path.read_bytes() == before
    with closing(sqlite3.connect(writer.path)) as connection:
        connection.execute("PRAGMA user_version = 1")
    with pytest.raises(StoreError, match="has schema version 1; this ampscope reads"):
        list(merge([writer.path], tmp_path / "runs.db"))


def test_the_target_may_be_among_the_sources(tmp_path: Path) -> None:
    first, second = rank_run(tmp_path / "x", 0), rank_run(tmp_path / "y", 1)
    into = tmp_path / "x" / "all.db"
    shutil.copy(second.path, into)
    assert len(list(merge(stores_in([tmp_path / "x"]), into))) == 1
    with Reader(into) as reader:
        assert {info.id for info in reader.runs()} == {first.run_id, second.run_id}


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no store"):
        stores_in([tmp_path])


def test_the_command(tmp_path: Path) -> None:
    for rank in range(2):
        rank_run(tmp_path / "ranks", rank, world=2).path.rename(
            tmp_path / "ranks" / f"node{rank}.db"
        )
    into = tmp_path / "runs.db"
    done = run_command("runs", "merge", tmp_path / "ranks", "--into", into)
    assert (done.returncode, done.stdout.count(" copied (")) == (0, 2)
    assert "2 of 2 runs copied from 2 stores" in done.stdout
    again = run_command("runs", "merge", tmp_path / "ranks" / "node1.db", "--store", into)
    assert "is there already" in again.stdout
    missing = run_command("runs", "merge", tmp_path / "none.db", "--into", into)
    assert_one_sentence(missing, "There is no store at")


def test_missing_ranks_are_counted_and_the_first_of_them_named(tmp_path: Path) -> None:
    writer = rank_run(tmp_path, 7, world=100_000)
    ended = run_command("runs", "ranks", writer.run_id, "--store", writer.path)
    assert ended.returncode == 0
    assert "Ranks not in this store: 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11" in ended.stdout
    assert "and 99,979 more" in ended.stdout


def foreign(folder: Path, group: str = "", parent: str = "") -> tuple[Path, str]:
    """A store from elsewhere: a script's run that says what would be started to repeat it."""
    script = folder / "theirs.py"
    script.write_text(f"open({str(folder / 'PWNED')!r}, 'w')\n")
    spec = RunSpec(str(script), kind="script", control="as_is", group=group, parent=parent)
    writer = RunWriter.create(folder / "foreign.db", spec)
    writer.finish(State.FINISHED)
    writer.close()
    return folder / "foreign.db", writer.run_id


def test_a_run_from_an_untrusted_store_is_never_run_again(tmp_path: Path) -> None:
    path, run_id = foreign(tmp_path)
    into = tmp_path / "runs.db"
    done = run_command("runs", "merge", path, "--into", into)
    assert done.returncode == 0, done.stderr
    assert "--trust" in done.stdout
    with Reader(into) as reader:
        assert reader.run(run_id).spec.imported.startswith("foreign.db on ")
        with pytest.raises(BadInput, match="was imported"):
            repeatable(reader.run(run_id))
    again = [sys.executable, "-m", "ampscope.launcher.script_runs", "--store", str(into)]
    ran = subprocess.run(
        [*again, "--run", run_id, "as_is"], capture_output=True, text=True, check=False
    )
    assert "This run was imported" in ran.stderr
    assert not (tmp_path / "PWNED").exists()
    assert [m.was_there for m in merge([path], into)] == [True]  # at another time
    assert [m.was_there for m in merge([path], into, trust=True)] == [True]
    with Reader(into) as reader:
        assert repeatable(reader.run(run_id)).workload == str(tmp_path / "theirs.py")
    assert [m.was_there for m in merge([path], into)] == [True]  # what is ours stays ours


def test_an_untrusted_run_joins_no_diagnosis_that_is_there(tmp_path: Path) -> None:
    into = tmp_path / "runs.db"
    own = RunWriter.create(into, RunSpec("mine.py", kind="script", control="as_is", group="job 7"))
    own.close()
    path, run_id = foreign(tmp_path, group="job 7", parent=own.run_id)
    list(merge([path], into))
    with Reader(into) as reader:
        assert [info.id for info in reader.group("job 7")] == [own.run_id]
        theirs = reader.run(run_id).spec
        assert theirs.parent == ""
        assert [info.id for info in reader.group(theirs.group)] == [run_id]
    ranks = [rank_run(tmp_path / f"rank{rank}", rank).path for rank in range(2)]
    for rank in ranks:  # one after the other, as they arrive
        list(merge([rank], into))
    with Reader(into) as reader:
        assert [info.spec.rank for info in reader.group(f"{theirs.group}")][-2:] == [0, 1]


@pytest.mark.parametrize("run_id", ["../../../ESCAPED", "0123456789ab\n", "0123456789AB", "ab"])
def test_a_run_whose_id_none_of_ours_has_is_refused(tmp_path: Path, run_id: str) -> None:
    path, _ = foreign(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE run SET id=?", (run_id,))
        connection.commit()
    with pytest.raises(StoreError, match="is not 12 hexadecimal digits"):
        list(merge([path], tmp_path / "runs.db"))
    assert not (tmp_path / "runs.db").exists()
    with Reader(path) as reader:
        (info,) = reader.runs()
    assert "its id is not 12 hexadecimal digits" in info.message
    out = tmp_path / "a" / "b" / "c"
    done = run_command("export", run_id, "--to", "tensorboard", "--out", out, "--store", path)
    assert_one_sentence(done, "its id is not 12 hexadecimal digits")
    assert not (tmp_path / "a").exists()
    delete_run(path, run_id)
    assert not dump(path, run_id)["run"]


def test_a_value_that_is_too_large_is_the_sources_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run_id = foreign(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE run SET message=?", ("x" * 4_000_000,))
        connection.commit()
    monkeypatch.setattr(db, "LONGEST_VALUE", 2**20)  # the source is larger, and lets it through
    into = tmp_path / "runs.db"
    with pytest.raises(StoreError, match="larger than any that ampscope writes") as refusal:
        list(merge([path], into))
    assert str(path) in str(refusal.value)
    assert str(into) not in str(refusal.value)
    assert not dump(into, run_id)["run"]


def test_what_a_merge_does_for_a_run_does_not_grow_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the copy itself: 20,000 times 20,000 ids would take 10 s and more."""
    path, _ = foreign(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        columns = connection.execute("SELECT * FROM run").fetchone()[1:]
        marks = ",".join("?" * len(columns))
        rows = [(f"{number:012x}", *columns) for number in range(20_000)]
        connection.executemany(f"INSERT INTO run VALUES (?,{marks})", rows)
        connection.commit()
    monkeypatch.setattr(merging, "_copy", lambda *of_a_run: False)
    begin = time.process_time()
    assert len(list(merge([path], tmp_path / "runs.db"))) == 20_001
    assert time.process_time() - begin < 4


def test_a_damaged_run_of_an_untrusted_store_is_refused(tmp_path: Path) -> None:
    path, run_id = foreign(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("""UPDATE run SET spec='{"workload":7}'""")
        connection.commit()
    with pytest.raises(StoreError, match="damaged run"):
        list(merge([path], tmp_path / "runs.db"))
    assert not dump(tmp_path / "runs.db", run_id)["run"]
