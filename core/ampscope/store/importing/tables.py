"""One run of a file as records: every table of an export, row by row."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ampscope import records
from ampscope.numerics.histogram import ABOVE, RAW_LEN
from ampscope.observations import Observation
from ampscope.record_json import Refusal
from ampscope.store import codec, export
from ampscope.store.importing import values
from ampscope.store.importing.values import fields, record, rows, whole

T = TypeVar("T")
Counts: TypeAlias = "tuple[array[int], array[int]]"  # columns of a raw row, and the count in each
_BINS = {export.bin_name(column): column for column in range(RAW_LEN)}
_count = whole(1, values.MOST_COUNT)
_op_set = whole(0, codec.MOST)
NAMES = (
    "run", "step", "module", "op", "shadow", "nonfinite", "event", "telemetry", "histogram",
    "observation", "result",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HistogramRow:
    """One histogram, but for its counts."""

    step: int
    role: records.Role
    module: int
    dtype: str
    scale: float
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything of one run."""

    info: records.RunInfo
    steps: list[records.StepRecord]
    modules: list[records.ModuleRecord]
    ops: list[tuple[int, records.OpRecord]]  # with the number of their set
    shadows: list[records.ShadowRecord]
    nonfinite: list[records.NonFiniteRecord]
    events: list[records.Event]
    samples: list[records.Sample]
    histograms: list[tuple[HistogramRow, Counts]]
    observations: list[Observation]
    results: list[records.Result]


def contents(value: object) -> Contents:
    """The tables of one run, each row checked by itself."""
    found = fields(value)
    for name in found:
        if name not in NAMES:
            raise Refusal("key", "an export has no such table").inside(name)
    for name in NAMES:
        if name not in found:
            raise Refusal("key", f"{name} is missing")
    return Contents(
        _info(found["run"]),
        _table(found, "step", lambda row: record(records.StepRecord, row)),
        _table(found, "module", lambda row: record(records.ModuleRecord, row)),
        _table(found, "op", _op),
        _table(found, "shadow", lambda row: record(records.ShadowRecord, row)),
        _table(found, "nonfinite", lambda row: record(records.NonFiniteRecord, row)),
        _table(found, "event", lambda row: record(records.Event, row)),
        _table(found, "telemetry", lambda row: record(records.Sample, row)),
        _table(found, "histogram", _histogram),
        _table(found, "observation", lambda row: _named(row, codec.OBSERVATION_CLASSES)),
        _table(found, "result", lambda row: _named(row, codec.RESULT_CLASSES)),
    )


def _info(value: object) -> records.RunInfo:
    try:
        return record(records.RunInfo, value)
    except Refusal as refusal:
        raise refusal.inside("run") from None


def _table(found: dict[str, object], name: str, of_row: Callable[[object], T]) -> list[T]:
    made: list[T] = []
    try:
        given = rows(found[name])
        for place, row in enumerate(given):
            try:
                made.append(of_row(row))
                given[place] = None  # a large file is not in memory twice
            except Refusal as refusal:
                raise refusal.inside(place) from None
    except Refusal as refusal:
        raise refusal.inside(name) from None
    return made


def _op(value: object) -> tuple[int, records.OpRecord]:
    found = dict(fields(value))
    number = _taken(found, "op_set", _op_set)
    return number, record(records.OpRecord, found)


def _histogram(value: object) -> tuple[HistogramRow, Counts]:
    found = dict(fields(value))
    counts = _taken(found, "counts", _counts)
    row = record(HistogramRow, found)
    if row.last_step is not None and row.last_step < row.step:
        raise Refusal("value", f"{row.last_step:,} is before step {row.step:,}").inside("last_step")
    return row, counts


def _counts(value: object) -> Counts:
    columns, counts = array("H"), array("q")
    for name, count in fields(value).items():
        column = _BINS.get(name)
        if column is None:
            first, last = (export.bin_name(column) for column in (1, ABOVE - 1))
            why = f"it is no bin; those are {first} to {last} and the special ones"
            raise Refusal("key", why).inside(name)
        try:
            counts.append(_count(count))
        except Refusal as refusal:
            raise refusal.inside(name) from None
        columns.append(column)
    return columns, counts


def _named(value: object, kinds: dict[str, type[Any]]) -> Any:
    """A record whose kind the row names."""
    found = dict(fields(value))
    kind = kinds.get(_taken(found, "record", _kind_name))
    if kind is None:
        known = ", ".join(kinds)
        raise Refusal("value", f"it is none of {known}").inside("record")
    return record(kind, found)


def _kind_name(value: object) -> str:
    if type(value) is not str:
        raise Refusal("type", "the name of a record was expected")
    return value


def _taken(found: dict[str, object], name: str, check: Callable[[object], T]) -> T:
    """Check one field and take it out."""
    if name not in found:
        raise Refusal("key", f"{name} is missing")
    try:
        return check(found.pop(name))
    except Refusal as refusal:
        raise refusal.inside(name) from None
