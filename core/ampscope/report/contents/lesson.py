"""What a lesson measured, as tables and charts; what it means stands on the lesson's own page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ampscope.analysis.loss_scale import finite_parts
from ampscope.formats import FP16
from ampscope.records import Call, Curve, Fates, Histogram, Reading, Result, RunInfo, Tally
from ampscope.report import document
from ampscope.report.colours import DTYPES, MEASURE
from ampscope.report.document import Block, Fold, Lines, Series, Table
from ampscope.report.words.numbers import number

COLOURS = (MEASURE, *DTYPES.values())
DASHES = ("", "9 6", "2 4", "9 4 2 4")
MOST_HISTOGRAMS = 6
_TABLES: tuple[type[Result], ...] = (Reading, Fates, Tally, Call)


def told(run: RunInfo, results: Sequence[Result]) -> tuple[str, tuple[Block, ...]]:
    """The title, and what was measured."""
    blocks: list[Block] = [_table(kind, results) for kind in _TABLES if _of(kind, results)]
    curves = [r for r in results if isinstance(r, Curve)]
    for name in dict.fromkeys(curve.name for curve in curves):
        blocks += _curves(name, [c for c in curves if c.name == name])
    histograms = [r for r in results if isinstance(r, Histogram)]
    blocks += [
        document.Histogram(f"{h.name}, {h.series}, {h.dtype}", np.array(h.row, np.int64), FP16)
        for h in histograms[:MOST_HISTOGRAMS]
    ]
    asked = ", ".join(f"{name} {value}" for name, value in run.spec.settings)
    return f"Lesson {run.spec.workload}{f' ({asked})' if asked else ''}: measured.", tuple(blocks)


def _of(kind: type[Result], results: Sequence[Result]) -> list[Result]:
    return [r for r in results if isinstance(r, kind)]


def _table(kind: type[Result], results: Sequence[Result]) -> Fold:
    names = [field.name for field in dataclasses.fields(kind)]
    rows = tuple(tuple(_cell(getattr(r, name)) for name in names) for r in _of(kind, results))
    columns = tuple(name.replace("_", " ") for name in names)
    return Fold(f"{kind.__name__}: {len(rows):,}", (Table(columns, rows),))


def _curves(name: str, curves: Sequence[Curve]) -> list[Block]:
    """Over steps where x counts them; another x has no place on the axis of a report."""
    if not all(float(x).is_integer() and abs(x) < 1e15 for c in curves for x in c.x):
        rows = tuple((c.series, number(x), number(y)) for c in curves for x, y in _pairs(c))
        return [Fold(name, (Table(("Case", "x", name), rows, numeric=(1, 2)),))]
    series = tuple(
        Series(
            c.series,
            finite_parts([int(x) for x, _ in _pairs(c)], [y for _, y in _pairs(c)]),
            COLOURS[n % len(COLOURS)],
            DASHES[n % len(DASHES)],
        )
        for n, c in enumerate(curves)
    )
    return [Lines(name, name, series, x_title="step")]


def _pairs(curve: Curve) -> list[tuple[float, float]]:
    return sorted(zip(curve.x, curve.y, strict=True), key=lambda pair: pair[0])


def _cell(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)
