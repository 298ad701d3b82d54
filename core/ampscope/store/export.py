"""Export a run: one JSON file, or a folder with one Parquet file a table.

Histograms are exported sparse: one row per (step, role, module, dtype, bin) with its count. JSON
has no NaN and no infinity; both are written as strings there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ampscope.errors import StoreError
from ampscope.exponents import ABOVE, BELOW, EXPONENTS, NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO
from ampscope.records import Role, RunInfo
from ampscope.store.reader import Reader

Row = dict[str, object]
_SPECIAL = {
    BELOW: "<2^-149",
    ABOVE: ">=2^128",
    POS_ZERO: "+0",
    NEG_ZERO: "-0",
    NAN: "nan",
    POS_INF: "+inf",
    NEG_INF: "-inf",
}


def tables(reader: Reader, info: RunInfo) -> dict[str, list[Row]]:
    """Every table of the run as rows of plain values."""
    steps = reader.steps(info.id)
    op_sets = sorted({s.op_set for s in steps if s.op_set is not None})
    ops = [
        {"op_set": n, **dataclasses.asdict(op)} for n in op_sets for op in reader.ops(info.id, n)
    ]
    return {
        "step": [dataclasses.asdict(s) for s in steps],
        "module": [dataclasses.asdict(m) for m in reader.modules(info.id)],
        "op": ops,
        "shadow": [dataclasses.asdict(s) for s in reader.shadows(info.id)],
        "nonfinite": [dataclasses.asdict(n) for n in reader.nonfinite(info.id)],
        "histogram": [row for role in Role for row in _histogram_rows(reader, info.id, role)],
    }


def to_json(reader: Reader, info: RunInfo, out: Path) -> list[Path]:
    """Write ``out``; returns it. Raises StoreError when it cannot be written."""
    document = {"schema": 1, "run": dataclasses.asdict(info), **tables(reader, info)}
    _write(out, json.dumps(_finite(document)))
    return [out]


def to_parquet(reader: Reader, info: RunInfo, out: Path) -> list[Path]:
    """Write one file a table below the folder ``out``; returns the files that hold rows."""
    import pandas as pd

    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, rows in tables(reader, info).items():
            path = out / f"{name}.parquet"
            pd.DataFrame(rows).to_parquet(path)
            written.append(path)
    except OSError as error:
        raise StoreError(f"Cannot write below {out}: {error.strerror or error}.") from error
    _write(out / "run.json", json.dumps(_finite(dataclasses.asdict(info))))
    return [*written, out / "run.json"]


def _histogram_rows(reader: Reader, run_id: str, role: Role) -> Iterator[Row]:
    for frame in reader.frames(run_id, role):
        which, column = np.nonzero(frame.rows)
        for row, bin_ in zip(which.tolist(), column.tolist(), strict=True):
            yield {
                "step": frame.step,
                "role": str(role),
                "module": frame.modules[row],
                "dtype": frame.dtypes[row],
                "scale": frame.scale,
                "bin": _SPECIAL.get(bin_, "finite"),
                "exponent": None if bin_ in _SPECIAL else int(EXPONENTS[bin_]),
                "count": int(frame.rows[row, bin_]),
            }


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise StoreError(f"Cannot write {path}: {error.strerror or error}.") from error
