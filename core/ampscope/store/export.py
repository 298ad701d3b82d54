"""Export runs: one JSON file, which `ampscope import` reads back, or a folder of Parquet files.

JSON has no NaN and no infinity; both are written as the texts "nan", "inf" and "-inf". A row stands
on a line of its own. Histograms are by far the most, so they are written frame by frame::

    {"schema":2,"run":{…},"step":[{…},…],"module":[…],…}           one run
    {"schema":2,"runs":[{"run":{…},"step":[…],…},…]}               several

Versions:  1  first
           2  observation, result and telemetry; a histogram is one row
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from ampscope.errors import StoreError
from ampscope.finite_json import finite
from ampscope.records import RunInfo
from ampscope.store import export_tables
from ampscope.store.reader import Reader
from ampscope.whole_files import write_whole, written_aside

SCHEMA = 2


def to_json(reader: Reader, infos: Sequence[RunInfo], out: Path) -> list[Path]:
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


def to_parquet(reader: Reader, info: RunInfo, out: Path) -> list[Path]:
    """Write one file a table below the folder ``out``; returns the files."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    kinds = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
    written = [out / "run.json"]
    found = export_tables.tables(reader, info)
    for name, rows in export_tables.mixed(reader, info).items():
        content = iter([export_tables.mixed_columns(rows)])
        found[name] = {"record": "str", "data": "str"}, content
    found["histogram"] = export_tables.bins(reader, info.id)
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


def _write_run(file: TextIO, reader: Reader, info: RunInfo) -> None:
    """Its keys, without the braces."""
    file.write('"run":' + _json(dataclasses.asdict(info)))
    found = export_tables.tables(reader, info)
    found["histogram"] = export_tables.histograms(reader, info.id)
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
    for name, rows in export_tables.mixed(reader, info).items():
        _write_rows(file, name, rows)


def _write_rows(file: TextIO, name: str, rows: Iterable[dict[str, object]]) -> None:
    file.write(f',\n"{name}":[')
    separator = "\n"
    for row in rows:
        file.write(separator + _json(row))
        separator = ",\n"
    file.write("]")


def _json(value: object) -> str:
    return json.dumps(finite(value), separators=(",", ":"))


@contextlib.contextmanager
def _translated(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"Cannot write {out}: {error.strerror or error}.") from error
