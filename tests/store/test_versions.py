"""What a run holds beside its steps comes back as it was written; a store of another version is
refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ampscope.errors import StoreError
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Event, Frame, Rate, Role, RunSpec, Sample, StepRecord, Timing
from ampscope.store import codec, db
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

ROWS = np.arange(2 * RAW_LEN, dtype=np.int64).reshape(2, RAW_LEN)


@pytest.mark.parametrize("version", [1, db.SCHEMA_VERSION - 1, db.SCHEMA_VERSION + 1])
def test_another_version_is_refused_and_left_as_it_is(version: int, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    RunWriter.create(path, RunSpec("gpt")).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    for opened in (db.open_for_reading, db.open_for_writing):
        with pytest.raises(StoreError, match=f"has schema version {version}; this ampscope reads"):
            opened(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)


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
