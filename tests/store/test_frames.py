"""Packed histograms: round trips, size, damage."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampscope.errors import StoreError
from ampscope.numerics.histogram import RAW_LEN, Raw
from ampscope.store import frames

NAMES = frames.DTYPE_CODES[1:]
CELL = st.tuples(st.integers(0, RAW_LEN - 1), st.integers(0, 2**62))


@st.composite
def frame(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[str, ...], Raw]:
    """Sparse rows with counts of any size, in any order of modules."""
    modules = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=12)))
    dtypes = tuple(draw(st.sampled_from(NAMES)) for _ in modules)
    rows = np.zeros((len(modules), RAW_LEN), np.int64)
    for row in rows:
        for column, count in draw(st.lists(CELL, max_size=20)):
            row[column] = count
    return modules, dtypes, rows


@given(frame())
def test_round_trip(given_frame: tuple[tuple[int, ...], tuple[str, ...], Raw]) -> None:
    modules, dtypes, rows = given_frame
    read_modules, read_dtypes, read_rows = frames.unpack(frames.pack(modules, dtypes, rows))
    assert (read_modules, read_dtypes) == (modules, dtypes)
    assert read_rows.dtype == np.int64
    np.testing.assert_array_equal(read_rows, rows)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("column", [0, 1, 277, 278, 279, RAW_LEN - 1])
def test_every_width_of_counts_and_both_ends_of_a_row(count: int, column: int) -> None:
    rows = np.zeros((2, RAW_LEN), np.int64)
    rows[1, column] = count
    assert (frames.unpack(frames.pack((3, 9), ("fp16", "bf16"), rows))[2] == rows).all()


def test_full_rows() -> None:
    rows = np.arange(3 * RAW_LEN, dtype=np.int64).reshape(3, RAW_LEN) + 1
    assert (frames.unpack(frames.pack((0, 1, 2), ("fp32",) * 3, rows))[2] == rows).all()


def test_no_rows() -> None:
    modules, dtypes, rows = frames.unpack(frames.pack((), (), np.zeros((0, RAW_LEN), np.int64)))
    assert modules == dtypes == ()
    assert rows.shape == (0, RAW_LEN)


def test_a_dtype_that_has_no_code_is_a_question_mark() -> None:
    rows = np.zeros((1, RAW_LEN), np.int64)
    assert frames.unpack(frames.pack((0,), ("float4_e2m1fn_x2",), rows))[1] == ("?",)


def test_codes_of_stored_dtypes_never_change() -> None:
    assert frames.DTYPE_CODES[:9] == (
        "?", "fp64", "fp32", "bf16", "fp16", "e4m3", "e5m2", "complex64", "complex128",
    )  # fmt: skip


@given(st.data())
@settings(max_examples=300)
def test_damage_is_a_store_error_or_a_frame_and_nothing_else(data: st.DataObject) -> None:
    rows = np.zeros((3, RAW_LEN), np.int64)
    rows[0, 5], rows[1, 283], rows[2, 10:40] = 3, 2**40, 7
    blob = frames.pack((0, 1, 2), ("fp16", "fp32", "bf16"), rows)
    body = bytearray(zlib.decompress(blob[1:]))
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255)), max_size=4)
    ):
        body[at] = value
    width = data.draw(st.integers(0, 255))
    for damaged in (bytes([width]) + zlib.compress(bytes(body)), bytes([width]) + bytes(body)):
        for read in (frames.unpack, lambda b: frames.unpack_module(b, 1)):
            try:
                read(damaged)
            except StoreError as error:
                assert "delete this run" in str(error)  # noqa: PT017  # most are, some are not
