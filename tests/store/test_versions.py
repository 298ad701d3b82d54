"""An older store is converted once, in one transaction, and nothing in it is lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ampscope.errors import StoreError
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Event, Frame, Rate, Role, RunSpec, Sample, StepRecord, Timing
from ampscope.store import codec, db, frames, sharing
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from tests.helpers.child_runs import assert_one_sentence, command_line, read_only

# The schemas as those versions wrote them, without their comments.
VERSION_1 = (Path(__file__).parent / "schema_version_1.sql").read_text()
VERSION_2 = (Path(__file__).parent / "schema_version_2.sql").read_text()
VERSION_3 = (Path(__file__).parent / "schema_version_3.sql").read_text()
VERSION_4 = (Path(__file__).parent / "schema_version_4.sql").read_text()
ROWS = np.arange(2 * RAW_LEN, dtype=np.int64).reshape(2, RAW_LEN)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Written with plain SQL, as version 1 did; its RunSpec has no rank."""
    path = tmp_path / "store" / "old.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_1)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "INSERT INTO run (id,spec,state,created) VALUES (?,?,?,?)",
            ("0123456789ab", '{"workload":"gpt","steps":3}', "finished", 1.0),
        )
        for step, loss in ((0, 2.5), (1, "nan"), (2, 1.5)):
            connection.execute(
                "INSERT INTO step (run,step,loss,skipped,step_time_s,overhead_s)"
                " VALUES (?,?,?,0,3,1)",
                ("0123456789ab", step, loss),
            )
        blob = frames.pack((0, 4), ("fp16", "fp32"), ROWS)
        connection.execute(
            "INSERT INTO frame (run,role,step,scale,blob) VALUES (?,?,?,?,?)",
            ("0123456789ab", "weight", 2, 1.0, blob),
        )
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
    return path


def layout(path: Path) -> set[tuple[str, str]]:
    """Every table and index with its columns and their types, keys and defaults."""
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT type, name FROM sqlite_master").fetchall()
        pragma = {"table": "table_info", "index": "index_info"}
        return {
            (name, str(connection.execute(f"PRAGMA {pragma[kind]}({name})").fetchall()))
            for kind, name in names
        }


@pytest.mark.parametrize("opened_by", ["reader", "writer"])
def test_version_1_is_converted_and_kept(old: Path, opened_by: str, tmp_path: Path) -> None:
    if opened_by == "writer":
        db.open_for_writing(old).close()
        with closing(sqlite3.connect(old)) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (db.SCHEMA_VERSION,)
    with Reader(old) as reader:
        info = reader.runs()[0]
        assert (info.spec, info.spec.rank, info.spec.world) == (RunSpec("gpt", steps=3), 0, 1)
        assert [str(s.loss) for s in reader.steps(info.id)] == ["2.5", "nan", "1.5"]
        assert info.id == reader.run("0123456789ab").id
        assert reader.run(info.id).overhead_share == 0.25
        frame = reader.frame(info.id, Role.WEIGHT, 2)
        assert frame is not None
        assert frame.last_step is None
        assert (frame.rows == ROWS).all()
        assert reader.events(info.id) == []
    RunWriter.create(tmp_path / "new.db", RunSpec("gpt")).close()
    assert layout(old) == layout(tmp_path / "new.db")
    with closing(sqlite3.connect(old)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_version_2_is_converted_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "two.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_2)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "INSERT INTO run (id,spec,state,created) VALUES ('0000000000ab',?,'finished',1.0)",
            ('{"workload":"train.py","kind":"watch"}',),
        )
        connection.execute(
            "INSERT INTO step (run,step,loss,skipped) VALUES ('0000000000ab',0,2.5,0)"
        )
        connection.execute(
            "INSERT INTO event (run,seq,step,kind,name,text,path)"
            " VALUES ('0000000000ab',0,7,'note','','x','')"
        )
        connection.execute("PRAGMA user_version = 2")
        connection.commit()
    with Reader(path) as reader:
        assert reader.steps("0000000000ab") == [StepRecord(0, loss=2.5)]
        assert reader.events("0000000000ab") == [Event(7, "note", "", "x")]
        assert (reader.results("0000000000ab"), reader.samples("0000000000ab")) == ([], [])
        assert (
            reader.run("0000000000ab").spec.seeds,
            reader.run("0000000000ab").spec.is_training,
        ) == (1, True)
    RunWriter.create(tmp_path / "new.db", RunSpec("gpt")).close()
    assert layout(path) == layout(tmp_path / "new.db")


def test_version_3_is_converted_and_shows_nothing_to_a_class(tmp_path: Path) -> None:
    path = tmp_path / "three.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_3)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "INSERT INTO run (id,spec,state,created) VALUES ('0000000000ab',?,'finished',1.0)",
            ('{"workload":"gpt"}',),
        )
        connection.execute(
            "INSERT INTO step (run,step,loss,skipped) VALUES ('0000000000ab',0,2.5,0)"
        )
        connection.execute("PRAGMA user_version = 3")
        connection.commit()
    assert sharing.shared(path) == frozenset()
    with Reader(path) as reader:
        assert reader.steps("0000000000ab") == [StepRecord(0, loss=2.5)]
    RunWriter.create(tmp_path / "new.db", RunSpec("gpt")).close()
    assert layout(path) == layout(tmp_path / "new.db")


def test_version_4_is_converted_and_does_not_say_why_values_were_lost(tmp_path: Path) -> None:
    path = tmp_path / "four.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_4)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "INSERT INTO run (id,spec,state,created) VALUES ('0000000000ab',?,'finished',1.0)",
            ('{"workload":"gpt"}',),
        )
        connection.execute(
            "INSERT INTO step (run,step,loss,skipped) VALUES ('0000000000ab',0,2.5,0)"
        )
        connection.execute(
            "INSERT INTO shadow VALUES ('0000000000ab',0,3,'weight_grad',100,7,2,10,0.5,0.9,1.5)"
        )
        connection.execute("PRAGMA user_version = 4")
        connection.commit()
    with Reader(path) as reader:
        assert reader.steps("0000000000ab") == [StepRecord(0, loss=2.5)]
        (record,) = reader.shadows("0000000000ab")
        assert (record.lost, record.below_range, record.cancelled) == (7, None, None)
        assert (record.zero_before, record.max_abs_fp32) == (10, 1.5)
    RunWriter.create(tmp_path / "new.db", RunSpec("gpt")).close()
    assert layout(path) == layout(tmp_path / "new.db")


def test_version_5_is_converted_and_has_concluded_nothing(tmp_path: Path) -> None:
    path = tmp_path / "five.db"
    RunWriter.create(path, RunSpec("train.py", kind="script")).close()
    new = layout(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE conclusion")
        connection.execute("PRAGMA user_version = 5")
        connection.commit()
    with Reader(path) as reader:
        assert reader.conclusion(reader.runs()[0].id) == ""
    assert layout(path) == new


def test_results_and_samples_come_back(tmp_path: Path) -> None:
    timing = Timing(1e-3, 9e-4, float("inf"), 7)
    rates = [
        Rate("ceiling", "matmul", "bf16", (8, 8, 8), 1024, 384, timing, 2.0),
        Rate("ceiling", "matmul", "e4m3", (8, 8, 8), 1024, 192, None, 3.0, note="Not here."),
    ]
    samples = [
        Sample("cpu", 5.0, busy_percent=50.0, memory_used_bytes=2**40),
        Sample("cuda:0", 5.1, clock_reasons="power cap,heat", other_processes=0),
    ]
    writer = RunWriter.create(tmp_path / "s.db", RunSpec("", kind="bench"))
    writer.add_result(rates[0])
    writer.add_samples(samples)
    writer.close()
    second = RunWriter(tmp_path / "s.db", writer.run_id)
    second.add_result(rates[1])
    second.close()
    with Reader(tmp_path / "s.db") as reader:
        assert reader.results(writer.run_id) == rates
        assert reader.samples(writer.run_id) == samples


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("Nothing", "{}"),
        ("Rate", "[]"),
        ("Rate", '{"series":"ceiling"}'),
        ("Timing", '{"median_s":1,"low_s":1,"high_s":1,"repeats":1}'),
        (
            "Rate",
            '{"series":1,"op":"","dtype":"","shape":[],"flops":0,"moved_bytes":0,"timing":null,'
            '"measured_at":0}',
        ),
    ],
)
def test_a_damaged_result_is_refused(kind: str, data: str) -> None:
    with pytest.raises(StoreError, match="delete this run"):
        codec.decode_result(kind, data)


def test_a_conversion_that_fails_leaves_version_1(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = db.schema_text()
    monkeypatch.setattr(db, "schema_text", lambda: text + "; CREATE TABLE oops (a, a);")
    with pytest.raises(StoreError, match="duplicate column"):
        db.open_for_writing(old)
    monkeypatch.undo()
    with closing(sqlite3.connect(old)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        found = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        assert "event" not in found
    with Reader(old) as reader:
        assert len(reader.steps("0123456789ab")) == 3


def test_a_read_only_store_of_version_1_says_what_to_do(old: Path) -> None:
    if read_only(old.parent, ["true"]).returncode:
        pytest.skip("no user namespaces here to mount a folder read-only")
    listed = read_only(old.parent, command_line("runs", "list", "--store", old))
    assert_one_sentence(listed, "has schema version 1 and is read-only")


def test_events_come_back_in_order_also_of_a_second_writer(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    events = [
        Event(7, "alarm", "skips", "5 skips in a row.", value=float("inf")),
        Event(3, "capsule", "capsule", "Kept.", path="/x/y.safetensors"),
        Event(9, "nonfinite", "loss", "The loss is Inf."),
    ]
    first = RunWriter.create(path, RunSpec("train.py", kind="watch", rank=1, world=2))
    for event in events[:2]:
        first.add_event(event)
    first.add_step(StepRecord(0))
    first.close()
    second = RunWriter(path, first.run_id)
    second.add_event(events[2])
    second.close()
    with Reader(path) as reader:
        assert reader.events(first.run_id) == events
        spec = reader.run(first.run_id).spec
        assert (spec.kind, spec.rank, spec.world) == ("watch", 1, 2)


def test_a_frame_of_several_steps_covers_all_of_them(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "s.db", RunSpec("gpt"))
    for step, last in ((0, 30), (40, None), (50, 70)):
        writer.add_frame(Frame(step, Role.WEIGHT, (0, 4), ("fp16", "fp32"), ROWS + step, 1.0, last))
    writer.close()
    with Reader(tmp_path / "s.db") as reader:
        run = writer.run_id
        assert reader.frame_spans(run, Role.WEIGHT) == [(0, 30), (40, 40), (50, 70)]
        assert reader.frame_steps(run, Role.WEIGHT) == [0, 40, 50]
        for step, first in ((0, 0), (15, 0), (30, 0), (40, 40), (50, 50), (70, 50)):
            frame = reader.frame(run, Role.WEIGHT, step)
            assert frame is not None
            assert frame.step == first
        for step in (31, 39, 41, 49, 71):
            assert reader.frame(run, Role.WEIGHT, step) is None
