"""Export runs: one JSON file, which `ampscope import` reads back, or a folder of Parquet files.

NaN and infinities are the texts "nan", "inf" and "-inf". A row stands on a line of its own.
Histograms are by far the most, so they are written frame by frame. They are sparse, one row a
(step, role, module, dtype): in JSON such a row has its counts as an object, ``{"-4": 5, "+0": 9}``,
by power of two; in Parquet every bin is a row::

    {"schema":2,"run":{…},"step":[{…},…],"module":[…],…}           one run
    {"schema":2,"runs":[{"run":{…},"step":[…],…},…]}               several

Versions:  1  first
           2  observation, result and telemetry; a histogram is one row
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ampscope import records
from ampscope.errors import StoreError
from ampscope.files import write_whole, written_aside
from ampscope.numerics import histogram
from ampscope.observations import Observation
from ampscope.record_json import dumps
from ampscope.store.reader import Reader

SCHEMA = 2
Columns = Mapping[str, Sequence[object]]
Tables = dict[str, tuple[Mapping[str, str], Iterator[Columns]]]
SPECIAL = {
    histogram.BELOW: "<2^-149",
    histogram.ABOVE: ">=2^128",
    histogram.POS_ZERO: "+0",
    histogram.NEG_ZERO: "-0",
    histogram.NAN: "nan",
    histogram.POS_INF: "+inf",
    histogram.NEG_INF: "-inf",
}
_KEYS = {"step": "int", "role": "str", "module": "int", "dtype": "str", "scale": "float"}
_HISTOGRAM = {
    **_KEYS,
    "last_step": "int",  # where the counts of several recorded steps were added up
    "counts": "object",
}
_BINS = {
    **_KEYS,
    "bin": "str",  # "finite", or one of SPECIAL
    "exponent": "int",
    "count": "int",
    "last_step": "int",
}


def to_json(reader: Reader, infos: Sequence[records.RunInfo], out: Path) -> list[Path]:
    """Write ``out``; returns it. Raises StoreError when it cannot be written."""
    with (
        _translated(out),
        written_aside(out) as aside,
        aside.open("w", encoding="utf-8") as file,
    ):
        file.write(f'{{"schema":{SCHEMA},')
        if len(infos) == 1:
            _write_run(file, reader, infos[0])
        else:
            file.write('"runs":[\n')
            for place, info in enumerate(infos):
                file.write(",\n{" if place else "{")
                _write_run(file, reader, info)
                file.write("}")
            file.write("\n]")
        file.write("}\n")
    return [out]


def to_parquet(reader: Reader, info: records.RunInfo, out: Path) -> list[Path]:
    """Write one file per table below the folder ``out``; returns the files."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    kinds = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
    written = [out / "run.json"]
    found = tables(reader, info)
    for name, rows in mixed(reader, info).items():
        content = iter([mixed_columns(rows)])
        found[name] = {"record": "str", "data": "str"}, content
    found["histogram"] = bins(reader, info.id)
    with _translated(out):
        out.mkdir(parents=True, exist_ok=True)
        write_whole(written[0], _json(dataclasses.asdict(info)) + "\n")
        for name, (types, parts) in found.items():
            schema = pa.schema([(column, kinds[types[column]]) for column in types])
            path = out / f"{name}.parquet"
            with written_aside(path) as aside, ParquetWriter(aside, schema) as writer:
                for part in parts:
                    writer.write_table(pa.table(dict(part), schema=schema))
            written.append(path)
    return written


def _write_run(file: TextIO, reader: Reader, info: records.RunInfo) -> None:
    """Its keys, without the braces."""
    file.write('"run":' + _json(dataclasses.asdict(info)))
    found = tables(reader, info)
    found["histogram"] = histograms(reader, info.id)
    for name, (types, parts) in found.items():
        _write_rows(
            file,
            name,
            (
                dict(zip(types, row, strict=True))
                for part in parts
                for row in zip(*(part[column] for column in types), strict=True)
            ),
        )
    for name, rows in mixed(reader, info).items():
        _write_rows(file, name, rows)


def _write_rows(file: TextIO, name: str, rows: Iterable[dict[str, object]]) -> None:
    file.write(f',\n"{name}":[')
    separator = "\n"
    for row in rows:
        file.write(separator + _json(row))
        separator = ",\n"
    file.write("]")


def _json(value: object) -> str:
    return dumps(value, separators=(",", ":"))


@contextlib.contextmanager
def _translated(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"Cannot write {out}: {error.strerror or error}.") from error


def tables(reader: Reader, info: records.RunInfo) -> Tables:
    """Of an exported run, in parts, the same in both formats: the types of their columns, and their
    content."""
    steps = reader.steps(info.id)
    sets = sorted({step.op_set for step in steps if step.op_set is not None})
    ops = [(number, op) for number in sets for op in reader.ops(info.id, number)]
    op_types, op_parts = _records(records.OpRecord, [op for _, op in ops])
    op_parts = iter([{"op_set": [number for number, _ in ops], **next(op_parts)}])
    return {
        "step": _records(records.StepRecord, steps),
        "module": _records(records.ModuleRecord, reader.modules(info.id)),
        "op": ({"op_set": "int", **op_types}, op_parts),
        "shadow": _records(records.ShadowRecord, reader.shadows(info.id)),
        "nonfinite": _records(records.NonFiniteRecord, reader.nonfinite(info.id)),
        "event": _records(records.Event, reader.events(info.id)),
        "telemetry": _records(records.Sample, reader.samples(info.id)),
    }


def _records(
    kind: type[Any], found: Sequence[object]
) -> tuple[Mapping[str, str], Iterator[Columns]]:
    # Every field of a record is an int, a float, a bool or text, or None; Role is text.
    types = {f.name: str(f.type).removesuffix(" | None") for f in dataclasses.fields(kind)}
    types = {name: "str" if kind == "Role" else kind for name, kind in types.items()}
    return types, iter([{name: [getattr(r, name) for r in found] for name in types}])


def mixed(reader: Reader, info: records.RunInfo) -> dict[str, list[dict[str, object]]]:
    """Tables whose rows are records of several kinds, each with the name of its kind."""
    return {
        "observation": [_named(record) for record in reader.observations(info.id)],
        "result": [_named(record) for record in reader.results(info.id)],
    }


def _named(record: Observation | records.Result) -> dict[str, object]:
    # Two observations have a field `kind` of their own; the record's name has another key.
    return {"record": type(record).__name__, **dataclasses.asdict(record)}


def mixed_columns(rows: Sequence[dict[str, object]]) -> Columns:
    """Rows of several kinds as Parquet columns: the kind, and the other fields as JSON."""
    fields = [{k: v for k, v in row.items() if k != "record"} for row in rows]
    data = [_json(row) for row in fields]
    return {"record": [row["record"] for row in rows], "data": data}


def histograms(reader: Reader, run_id: str) -> tuple[Mapping[str, str], Iterator[Columns]]:
    """One row per histogram."""
    return _HISTOGRAM, (_histogram(frame) for frame in _frames(reader, run_id))


def _histogram(frame: records.Frame) -> Columns:
    counts = []
    for row in frame.rows:
        columns = np.flatnonzero(row)
        counts.append(
            {bin_name(c): n for c, n in zip(columns.tolist(), row[columns].tolist(), strict=True)}
        )
    size = len(frame.modules)
    return {**_key(frame, size, list(range(size))), "counts": counts}


def _frames(reader: Reader, run_id: str) -> Iterator[records.Frame]:
    for role in records.Role:
        yield from reader.frames(run_id, role)


def bins(reader: Reader, run_id: str) -> tuple[Mapping[str, str], Iterator[Columns]]:
    """One row per occupied bin of a histogram."""
    return _BINS, (_bins(frame) for frame in _frames(reader, run_id))


def bin_name(column: int) -> str:
    """Of a column of a raw row."""
    return SPECIAL.get(column) or str(int(histogram.EXPONENTS[column]))


def _bins(frame: records.Frame) -> Columns:
    which, column = np.nonzero(frame.rows)
    rows, columns = which.tolist(), column.tolist()
    return {
        **_key(frame, len(rows), rows),
        "bin": [SPECIAL.get(bin_, "finite") for bin_ in columns],
        "exponent": [
            None if bin_ in SPECIAL else int(histogram.EXPONENTS[bin_]) for bin_ in columns
        ],
        "count": frame.rows[which, column].tolist(),
    }


def _key(frame: records.Frame, size: int, rows: Sequence[int]) -> dict[str, list[object]]:
    return {
        "step": [frame.step] * size,
        "role": [str(frame.role)] * size,
        "module": [frame.modules[row] for row in rows],
        "dtype": [frame.dtypes[row] for row in rows],
        "scale": [frame.scale] * size,
        "last_step": [frame.last_step] * size,
    }
