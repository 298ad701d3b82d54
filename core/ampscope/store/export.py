"""Export a run: one JSON file, or a folder with one Parquet file a table.

Histograms are exported sparse: one row per (step, role, module, dtype, bin) with its count. They
are by far the most (a run of 500 modules and 1,000 steps has about 50 million such rows), so they
are written frame by frame. JSON has no NaN and no infinity; both are written as strings there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ampscope.errors import StoreError
from ampscope.exponents import ABOVE, BELOW, EXPONENTS, NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO
from ampscope.finite_json import finite
from ampscope.records import (
    Event,
    Frame,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    RunInfo,
    ShadowRecord,
    StepRecord,
)
from ampscope.store.reader import Reader

Columns = Mapping[str, Sequence[object]]
_SPECIAL = {
    BELOW: "<2^-149",
    ABOVE: ">=2^128",
    POS_ZERO: "+0",
    NEG_ZERO: "-0",
    NAN: "nan",
    POS_INF: "+inf",
    NEG_INF: "-inf",
}
_HISTOGRAM = {
    "step": "int",
    "role": "str",
    "module": "int",
    "dtype": "str",
    "scale": "float",
    "bin": "str",  # "finite", or one of _SPECIAL
    "exponent": "int",
    "count": "int",
    "last_step": "int",  # where the counts of several recorded steps were added up
}


def to_json(reader: Reader, info: RunInfo, out: Path) -> list[Path]:
    """Write ``out``; returns it. Raises StoreError when it cannot be written."""
    with _translated(out), out.open("w", encoding="utf-8") as file:
        file.write('{"schema":1,"run":' + _json(dataclasses.asdict(info)))
        for name, (types, parts) in _tables(reader, info).items():
            file.write(f',\n"{name}":[')
            separator = "\n"
            for part in parts:
                for row in zip(*part.values(), strict=True):
                    file.write(separator + _json(dict(zip(types, row, strict=True))))
                    separator = ",\n"
            file.write("]")
        file.write("}\n")
    return [out]


def to_parquet(reader: Reader, info: RunInfo, out: Path) -> list[Path]:
    """Write one file a table below the folder ``out``; returns the files."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    kinds = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
    written = [out / "run.json"]
    with _translated(out):
        out.mkdir(parents=True, exist_ok=True)
        written[0].write_text(_json(dataclasses.asdict(info)) + "\n", encoding="utf-8")
        for name, (types, parts) in _tables(reader, info).items():
            schema = pa.schema([(column, kinds[kind]) for column, kind in types.items()])
            path = out / f"{name}.parquet"
            with ParquetWriter(path, schema) as writer:
                for part in parts:
                    writer.write_table(pa.table(dict(part), schema=schema))
            written.append(path)
    return written


def _tables(
    reader: Reader, info: RunInfo
) -> dict[str, tuple[Mapping[str, str], Iterator[Columns]]]:
    """Every table of the run: the types of its columns, and its content in parts."""
    steps = reader.steps(info.id)
    sets = sorted({step.op_set for step in steps if step.op_set is not None})
    ops = [(number, op) for number in sets for op in reader.ops(info.id, number)]
    op_types, op_parts = _records(OpRecord, [op for _, op in ops])
    op_parts = iter([{"op_set": [number for number, _ in ops], **next(op_parts)}])
    return {
        "step": _records(StepRecord, steps),
        "module": _records(ModuleRecord, reader.modules(info.id)),
        "op": ({"op_set": "int", **op_types}, op_parts),
        "shadow": _records(ShadowRecord, reader.shadows(info.id)),
        "nonfinite": _records(NonFiniteRecord, reader.nonfinite(info.id)),
        "event": _records(Event, reader.events(info.id)),
        "histogram": (_HISTOGRAM, _histograms(reader, info.id)),
    }


def _records(
    kind: type[Any], records: Sequence[object]
) -> tuple[Mapping[str, str], Iterator[Columns]]:
    # Every field of a record is an int, a float, a bool or text, or None; Role is text.
    types = {f.name: str(f.type).removesuffix(" | None") for f in dataclasses.fields(kind)}
    types = {name: "str" if kind == "Role" else kind for name, kind in types.items()}
    return types, iter([{name: [getattr(r, name) for r in records] for name in types}])


def _histograms(reader: Reader, run_id: str) -> Iterator[Columns]:
    for role in Role:
        for frame in reader.frames(run_id, role):
            yield _histogram(frame)


def _histogram(frame: Frame) -> Columns:
    which, column = np.nonzero(frame.rows)
    rows, bins = which.tolist(), column.tolist()
    return {
        "step": [frame.step] * len(rows),
        "role": [str(frame.role)] * len(rows),
        "module": [frame.modules[row] for row in rows],
        "dtype": [frame.dtypes[row] for row in rows],
        "scale": [frame.scale] * len(rows),
        "bin": [_SPECIAL.get(bin_, "finite") for bin_ in bins],
        "exponent": [None if bin_ in _SPECIAL else int(EXPONENTS[bin_]) for bin_ in bins],
        "count": frame.rows[which, column].tolist(),
        "last_step": [frame.last_step] * len(rows),
    }


def _json(value: object) -> str:
    return json.dumps(finite(value), separators=(",", ":"))


@contextlib.contextmanager
def _translated(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"Cannot write {out}: {error.strerror or error}.") from error
