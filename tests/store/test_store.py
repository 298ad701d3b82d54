"""The store: every record comes back as it went in; one file serves many processes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampscope.errors import BadInput, StoreError
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import (
    Cadence,
    Frame,
    Machine,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    RunSpec,
    ScalerSpec,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store import codec, db
from ampscope.store.importing.runs import import_file, opened
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter, delete_run, new_run_id, request_cancel

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
COUNT = st.integers(0, 2**63 - 1)
NUMBER = st.none() | st.floats(allow_nan=True, allow_infinity=True)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ROLE = st.sampled_from(Role)
STEP = st.builds(
    StepRecord,
    step=st.integers(0, 10**9),
    loss=NUMBER,
    scale=NUMBER,
    growth_counter=st.none() | COUNT,
    skipped=st.booleans(),
    grad_norm=NUMBER,
    lr=NUMBER,
    step_time_s=NUMBER,
    overhead_s=NUMBER,
    peak_bytes=st.none() | COUNT,
    moved_share=NUMBER,
    op_set=st.none() | st.integers(0, 2**48 - 1),
)
MODULE = st.builds(
    ModuleRecord,
    index=st.integers(0, 10**6),
    path=TEXT,
    type=TEXT,
    weight_dtypes=TEXT,
    parameter_count=COUNT,
    is_leaf=st.booleans(),
    shared_with=TEXT,
)
OP = st.builds(
    OpRecord,
    module=st.integers(0, 10**6),
    phase=st.sampled_from(["forward", "backward", "step"]),
    op=TEXT,
    inputs=TEXT,
    outputs=TEXT,
    count=COUNT,
    flops=COUNT,
    is_cast=st.booleans(),
)
SHADOW = st.builds(
    ShadowRecord,
    step=st.integers(0, 10**6),
    module=st.integers(0, 10**6),
    role=ROLE,
    total=COUNT,
    lost=COUNT,
    subnormal=COUNT,
    zero_before=COUNT,
    relative_error=NUMBER,
    cosine=NUMBER,
    max_abs_fp32=NUMBER,
)
NONFINITE = st.builds(
    NonFiniteRecord,
    step=st.integers(0, 10**6),
    parameter=TEXT,
    order=st.integers(0, 10**6),
    total=COUNT,
    nan=COUNT,
    pos_inf=COUNT,
    neg_inf=COUNT,
)
SPEC = st.builds(
    RunSpec,
    workload=TEXT,
    steps=COUNT,
    scaler=st.builds(ScalerSpec, init_scale=FINITE, growth_interval=COUNT),
    cadence=st.builds(Cadence, st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)),
    loss_factor=FINITE,
    label=TEXT,
    args=st.lists(TEXT, max_size=3).map(tuple),
)
MACHINE = st.builds(Machine, *[TEXT] * len(dataclasses.fields(Machine)))


def same(left: object, right: object) -> bool:
    """Equality of records, where NaN equals NaN; SQLite keeps -0.0 as 0."""

    def key(value: object) -> object:
        if isinstance(value, float):
            return "nan" if math.isnan(value) else value
        return value

    fields = [field.name for field in dataclasses.fields(left)]  # type: ignore[arg-type]  # a record
    return type(left) is type(right) and all(
        key(getattr(left, name)) == key(getattr(right, name)) for name in fields
    )


def unique(records: list[Any], *names: str) -> list[Any]:
    """The last of those that share a primary key, as INSERT OR REPLACE keeps it."""
    kept = {tuple(getattr(r, name) for name in names): r for r in records}
    return sorted(kept.values(), key=lambda r: tuple(getattr(r, name) for name in names))


@given(
    spec=SPEC,
    machine=MACHINE,
    steps=st.lists(STEP, max_size=3),
    modules=st.lists(MODULE, max_size=3),
    ops=st.lists(OP, max_size=3),
    shadows=st.lists(SHADOW, max_size=3),
    bad=st.lists(NONFINITE, max_size=3),
)
@settings(max_examples=40)
def test_every_record_comes_back(
    spec: RunSpec,
    machine: Machine,
    steps: list[StepRecord],
    modules: list[ModuleRecord],
    ops: list[OpRecord],
    shadows: list[ShadowRecord],
    bad: list[NonFiniteRecord],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.db"
        writer = RunWriter.create(path, spec)
        writer.start(machine)
        for step in steps:
            writer.add_step(step)
        writer.add_modules(modules)
        writer.add_ops(7, ops)
        writer.add_shadow(shadows)
        writer.add_nonfinite(bad)
        writer.finish(State.FAILED, "why", "Traceback …")
        writer.close()
        with Reader(path) as reader:
            info = reader.run(writer.run_id)
            assert (info.spec, info.machine, info.state) == (spec, machine, State.FAILED)
            assert (info.message, info.traceback) == ("why", "Traceback …")
            assert info.steps_done == len(steps)
            for found, expected in (
                (reader.steps(info.id), unique(steps, "step")),
                (reader.modules(info.id), unique(modules, "index")),
                (
                    unique(reader.ops(info.id, 7), *OP_KEY),
                    unique(ops, *OP_KEY),
                ),
                (unique(reader.shadows(info.id), *SHADOW_KEY), unique(shadows, *SHADOW_KEY)),
                (reader.nonfinite(info.id), unique(bad, "step", "order")),
            ):
                assert len(found) == len(expected)
                assert all(map(same, found, expected))


OP_KEY = ("module", "phase", "op", "inputs", "outputs")
SHADOW_KEY = ("step", "role", "module")


@pytest.mark.parametrize("scale", [1.0, 65536.0, 2.0**-149, math.inf])
def test_frames_come_back(tmp_path: Path, scale: float) -> None:
    writer = RunWriter.create(tmp_path / "s.db", RunSpec("gpt"))
    rows = np.random.default_rng(0).integers(0, 2**40, (2, RAW_LEN))
    for step in (5, 3):
        writer.add_frame(Frame(step, Role.GRAD_OUTPUT, (4, 1), ("fp16", "fp32"), rows, scale))
    writer.close()
    with Reader(tmp_path / "s.db") as reader:
        assert reader.frame_steps(writer.run_id, Role.GRAD_OUTPUT) == [3, 5]
        assert reader.frame(writer.run_id, Role.GRAD_OUTPUT, 4) is None
        for frame in reader.frames(writer.run_id, Role.GRAD_OUTPUT):
            assert (frame.modules, frame.dtypes, frame.scale) == ((4, 1), ("fp16", "fp32"), scale)
            assert (frame.rows == rows).all()


def test_what_is_pending_is_not_seen_and_what_is_flushed_is(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    writer = RunWriter.create(path, RunSpec("gpt"))
    with Reader(path) as reader:
        writer.add_step(StepRecord(0))
        assert reader.steps(writer.run_id) == []
        writer.flush()
        assert reader.run(writer.run_id).steps_done == 1
        assert len(reader.steps(writer.run_id)) == 1
    writer.close()


def test_a_name_with_half_a_character_is_spelled(tmp_path: Path) -> None:
    """Python lets a module have such a name; UTF-8, and so SQLite, does not."""
    path = tmp_path / "s.db"
    writer = RunWriter.create(path, RunSpec("gpt"))
    writer.add_modules([ModuleRecord(0, "l\udc80\u00fc", "Linear")])
    writer.finish(State.FAILED, "half \ud800")
    writer.close()
    with Reader(path) as reader:
        assert reader.run(writer.run_id).message == "half \\ud800"
        assert reader.modules(writer.run_id)[0].path == "l\\udc80\u00fc"


def test_cancel_and_delete(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    writer = RunWriter.create(path, RunSpec("gpt"))
    assert not writer.beat()
    request_cancel(path, writer.run_id)
    assert writer.beat()
    writer.add_step(StepRecord(0))
    writer.close()
    delete_run(path, writer.run_id)
    with Reader(path) as reader, pytest.raises(BadInput, match="not in this store"):
        reader.run(writer.run_id)
    left = sqlite3.connect(path).execute("SELECT count(*) FROM step").fetchone()[0]
    assert left == 0


def refused(path: Path) -> None:
    with pytest.raises(BadInput):
        import_file(path, path)


OPENS: dict[str, Callable[[Path], object]] = {
    "a reader": lambda path: Reader(path).close(),
    "a writer": lambda path: RunWriter(path, "0" * 12).close(),
    "a file to read": lambda path: opened(path).close(),
    "an import of it": refused,
    "a request": lambda path: request_cancel(path, "0" * 12),
}


@pytest.mark.parametrize("what", OPENS)
def test_nothing_is_lost_when_the_store_is_opened_beside(tmp_path: Path, what: str) -> None:
    """What opens and closes the file in the writer's process must leave the writer its locks: else
    another process that closes the store takes itself for the last and deletes the log."""
    path = tmp_path / "runs.db"
    writer = RunWriter.create(path, RunSpec("gpt"))
    OPENS[what](path)
    other = (
        "import sys; from pathlib import Path; from ampscope.store.writer import request_cancel;"
        "request_cancel(Path(sys.argv[1]), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", other, str(path), writer.run_id], check=True, timeout=60)
    assert writer.beat()
    writer.finish(State.CANCELLED, "Cancelled.")
    with contextlib.closing(writer), Reader(path) as reader:
        assert reader.run(writer.run_id).message == "Cancelled."


def test_ids_are_twelve_hexadecimal_digits_in_the_order_of_time() -> None:
    first = new_run_id()
    time.sleep(0.002)
    second = new_run_id()
    assert len(first) == 12
    assert int(first, 16) < int(second, 16)


def test_many_processes_may_create_the_store_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ampscope.records import RunSpec\n"
        "from ampscope.store.writer import RunWriter\n"
        "sys.stdin.readline()\n"
        "RunWriter.create(Path(sys.argv[1]), RunSpec('gpt')).close()\n"
    )
    path = tmp_path / "new" / "runs.db"
    command = [sys.executable, "-c", code, str(path)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    time.sleep(0.5)  # until they all stand at readline; no assertion depends on it
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        _, errors = child.communicate(timeout=60)
        assert (child.returncode, errors) == (0, "")
    with Reader(path) as reader:
        assert len(reader.runs()) == 6


def test_the_schema_in_the_file_is_that_of_the_documentation(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "s.db", RunSpec("gpt")).close()
    tables = sqlite3.connect(tmp_path / "s.db").execute("SELECT name FROM sqlite_master").fetchall()
    for (name,) in tables:
        if not name.startswith("sqlite_"):
            assert f" {name} " in db.schema_text()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "damaged"),
        ("[]", "not an object"),
        ("{}", "missing"),
        ('{"workload":3}', "workload is of type int"),
        ('{"workload":"gpt","steps":"many"}', "steps is of type str"),
        ('{"workload":"gpt","scaler":5}', "scaler is of type int"),
        ('{"workload":"gpt","steps":true}', "steps is of type bool"),
    ],
)
def test_a_damaged_spec_is_a_store_error(text: str, what: str) -> None:
    with pytest.raises(StoreError, match=what):
        codec.spec_from_json(text)


def test_a_spec_of_a_newer_minor_version_is_read() -> None:
    spec = codec.spec_from_json('{"workload":"gpt","from_the_future":1}')
    assert spec == RunSpec("gpt")
