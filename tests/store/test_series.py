"""Series reads, against decoding whole frames and against records in plain Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampscope.errors import StoreError
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Frame, NonFiniteRecord, Role, RunSpec
from ampscope.store import frames
from ampscope.store.reader import Reader
from ampscope.store.series import first_nonfinite, module_series
from ampscope.store.writer import RunWriter


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=9),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 200, 70_000, 2**40]),
)
@settings(max_examples=80)
def test_one_module_of_a_blob(modules: list[int], seed: int, largest: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, largest + 1, (len(modules), RAW_LEN))
    rows[rng.random(rows.shape) < 0.9] = 0
    blob = frames.pack(tuple(modules), ("fp16",) * len(modules), rows)
    for module in range(6):
        found = frames.unpack_module(blob, module)
        hits = [i for i, m in enumerate(modules) if m == module]
        if hits:
            assert found is not None
            assert (found == rows[hits].sum(axis=0)).all()
        else:
            assert found is None


@pytest.mark.parametrize(
    "blob", [b"", b"\x01", b"\x01nonsense", b"\x02x\x9c\x03\x00\x00\x00\x00\x01"]
)
def test_a_damaged_blob_is_a_store_error(blob: bytes) -> None:
    with pytest.raises(StoreError, match="damaged"):
        frames.unpack_module(blob, 0)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "runs.db"
    writer = RunWriter.create(path, RunSpec("gpt"))
    for step in (3, 1, 2):
        modules = (0, 4, 0) if step != 2 else (0,)
        rows = np.full((len(modules), RAW_LEN), step)
        dtypes = ("fp16",) * len(modules)
        writer.add_frame(Frame(step, Role.GRAD_OUTPUT, modules, dtypes, rows, 2.0**step))
    bad = [(1, "b", 4), (1, "a", 2), (7, "c", 0)]
    writer.add_nonfinite(NonFiniteRecord(s, name, order, 9, 1, 0, 0) for s, name, order in bad)
    writer.close()
    return path, writer.run_id


def test_a_module_over_time(written: tuple[Path, str]) -> None:
    path, run_id = written
    with Reader(path) as reader:
        series = module_series(reader, run_id, Role.GRAD_OUTPUT, 4)
        assert (series.steps, series.scales) == ((1, 3), (2.0, 8.0))
        assert (series.rows == [[1] * RAW_LEN, [3] * RAW_LEN]).all()
        twice = module_series(reader, run_id, Role.GRAD_OUTPUT, 0)
        assert twice.rows[:, 0].tolist() == [2, 2, 6]  # called twice in steps 1 and 3
        none = module_series(reader, run_id, Role.ACTIVATION, 0)
        assert (none.steps, none.rows.shape) == ((), (0, RAW_LEN))


def test_first_nonfinite_is_the_lowest_order_of_each_step(written: tuple[Path, str]) -> None:
    path, run_id = written
    with Reader(path) as reader:
        assert first_nonfinite(reader, run_id) == {1: (2, "a"), 7: (1, "c")}
        assert first_nonfinite(reader, "other") == {}
