"""Exports: what JSON and Parquet hold is what the reader gives."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ampscope.errors import StoreError
from ampscope.numerics.histogram import NAN, NEG_INF, NEG_ZERO, RAW_LEN
from ampscope.records import (
    Event,
    Frame,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    RunSpec,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store import export
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

TABLES = (
    "step", "module", "op", "shadow", "nonfinite", "event", "telemetry", "histogram",
    "observation", "result",
)  # fmt: skip


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """One run with something in every table, and every kind of special value."""
    writer = RunWriter.create(tmp_path / "s.db", RunSpec("gpt", label="a <b>"))
    writer.add_step(StepRecord(0, loss=math.nan, scale=math.inf, op_set=9))
    writer.add_step(StepRecord(1, loss=1.5, skipped=True))
    writer.add_modules([ModuleRecord(0, "", "GPT"), ModuleRecord(1, "h.0", "Linear", "fp32", 8)])
    writer.add_ops(9, [OpRecord(1, "forward", "aten.mm", "fp16,fp16", "fp16", 3, 12, False)])
    writer.add_shadow([ShadowRecord(0, 1, Role.ACTIVATION, 9, 1, 2, 3, None, math.nan, 4.0)])
    writer.add_nonfinite([NonFiniteRecord(1, "h.0.weight", 0, 9, 1, 2, 3)])
    writer.add_event(Event(1, "nonfinite", "loss", "The loss is NaN.", value=math.nan))
    rows = np.zeros((2, RAW_LEN), np.int64)
    rows[0, [0, 150, NAN]] = 5, 2**40, 1
    rows[1, [NEG_ZERO, NEG_INF]] = 7, 8
    for role in (Role.WEIGHT, Role.ACTIVATION):
        writer.add_frame(Frame(0, role, (1, 0), ("fp16", "fp32"), rows, 1.0))
    writer.finish(State.FINISHED)
    writer.close()
    return Reader(tmp_path / "s.db")


def test_json(reader: Reader, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    with reader:
        info = reader.runs()[0]
        assert export.to_json(reader, [info], out) == [out]
        steps = reader.steps(info.id)

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    document = json.loads(out.read_text(), parse_constant=refuse)
    assert document["schema"] == 2
    assert set(document) == {"schema", "run", *TABLES}
    assert document["run"]["spec"]["label"] == "a <b>"
    assert document["step"][0]["loss"] == "nan"
    assert document["step"][0]["scale"] == "inf"
    assert document["step"][1] == dataclasses.asdict(steps[1])
    assert document["op"] == [
        {
            "op_set": 9, "module": 1, "phase": "forward", "op": "aten.mm", "inputs": "fp16,fp16",
            "outputs": "fp16", "count": 3, "flops": 12, "is_cast": False,
        }
    ]  # fmt: skip
    assert document["event"] == [
        {
            "step": 1, "kind": "nonfinite", "name": "loss", "text": "The loss is NaN.", "path": "",
            "value": "nan",
        }
    ]  # fmt: skip
    histogram = [row for row in document["histogram"] if row["role"] == "weight"]
    assert [(r["module"], r["dtype"], r["counts"]) for r in histogram] == [
        (1, "fp16", {"<2^-149": 5, "0": 2**40, "nan": 1}),
        (0, "fp32", {"-0": 7, "-inf": 8}),
    ]


def test_parquet(reader: Reader, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    with reader:
        info = reader.runs()[0]
        written = export.to_parquet(reader, info, out)
        steps = reader.steps(info.id)
    assert {path.name for path in written} == {"run.json", *(f"{name}.parquet" for name in TABLES)}
    tables = {name: pd.read_parquet(out / f"{name}.parquet") for name in TABLES}
    assert list(tables["step"]) == [field.name for field in dataclasses.fields(StepRecord)]
    assert math.isnan(tables["step"]["loss"][0])
    assert tables["step"]["loss"][1] == steps[1].loss
    assert tables["step"]["skipped"].tolist() == [False, True]
    assert tables["histogram"]["count"].sum() == 2 * (5 + 2**40 + 1 + 7 + 8)
    assert tables["shadow"]["role"].tolist() == ["activation"]
    bins = tables["histogram"][tables["histogram"]["role"] == "weight"]
    assert bins["bin"].tolist() == ["<2^-149", "finite", "nan", "-0", "-inf"]
    assert bins["exponent"].dropna().tolist() == [0]


def test_an_empty_run_has_all_tables(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "s.db", RunSpec("gpt")).close()
    with Reader(tmp_path / "s.db") as reader:
        info = reader.runs()[0]
        export.to_parquet(reader, info, tmp_path / "out")
        export.to_json(reader, [info], tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    assert all(document[name] == [] for name in TABLES)
    assert next(iter(pd.read_parquet(tmp_path / "out" / "op.parquet"))) == "op_set"


def test_where_nothing_can_be_written(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    with reader:
        info = reader.runs()[0]
        with pytest.raises(StoreError, match="Cannot write"):
            export.to_json(reader, [info], below)
        with pytest.raises(StoreError, match="Cannot write"):
            export.to_parquet(reader, info, below)
