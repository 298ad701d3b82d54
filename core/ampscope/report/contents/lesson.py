"""What a lesson measured, as tables and charts; what it means stands on the lesson's own page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ampscope.analysis.loss_scale import finite_parts
from ampscope.formats import FP16
from ampscope.records import Curve, Histogram, Result, RunInfo
from ampscope.report import document
from ampscope.report.contents.looks import base, looks
from ampscope.report.contents.result_tables import table
from ampscope.report.document import Block, Fold, Lines, Series, Table
from ampscope.report.words.numbers import number, plural

MOST_HISTOGRAMS = 6
_DRAWN = (Curve, Histogram)  # every other type is a table
_OVER = {  # what x counts, where that is not steps
    "spacing": "exponent of two",
    "unchanged": "step, as an exponent of two of the weight",
    "sum": "terms",
    "error": "length",
    "running variance": "standard deviation",
}
_TITLES = {
    "Rate": "What products reached",
    "StepTimes": "Time of a training step",
    "MemorySplit": "Memory at the peak of a training step",
    "EnergyUse": "Energy",
    "Reading": "Numbers",
    "Fates": "What became of the elements",
    "Tally": "What tensors held",
    "Call": "Calls of ops",
}


def told(run: RunInfo, results: Sequence[Result]) -> tuple[str, tuple[Block, ...]]:
    """The title, and what was measured."""
    kinds = dict.fromkeys(type(r) for r in results if not isinstance(r, _DRAWN))
    blocks: list[Block] = [_table([r for r in results if type(r) is kind]) for kind in kinds]
    curves = [r for r in results if isinstance(r, Curve)]
    for name in dict.fromkeys(curve.name for curve in curves):
        blocks += _curves(name, [c for c in curves if c.name == name])
    blocks += [
        document.Histogram(f"{h.name}, {h.series}, {h.dtype}", np.array(h.row, np.int64), FP16)
        for h in histograms(results)[:MOST_HISTOGRAMS]
    ]
    asked = ", ".join(f"{name} {value}" for name, value in run.spec.settings)
    return f"Lesson {run.spec.workload}{f' ({asked})' if asked else ''}: measured.", tuple(blocks)


def histograms(results: Sequence[Result]) -> list[Histogram]:
    """All of them; a report draws the first :data:`MOST_HISTOGRAMS`."""
    return [r for r in results if isinstance(r, Histogram)]


def _table(results: Sequence[Result]) -> Fold:
    kind = type(results[0]).__name__
    title = f"{_TITLES.get(kind, kind)}, {plural(len(results), 'row')}"
    return Fold(title, (table(results),))


def _curves(name: str, curves: Sequence[Curve]) -> list[Block]:
    """Over whole numbers; another x has no place on the axis of a report."""
    if not all(float(x).is_integer() and abs(x) < 1e15 for c in curves for x in c.x):
        rows = tuple((c.series, number(x), number(y)) for c in curves for x, y in _pairs(c))
        return [Fold(name, (Table(("Case", "x", name), rows, numeric=(1, 2)),))]
    series = tuple(
        Series(
            c.series,
            finite_parts([int(x) for x, _ in _pairs(c)], [y for _, y in _pairs(c)]),
            colour,
            dash,
        )
        for c, (colour, dash) in zip(curves, looks([c.series for c in curves]), strict=True)
    )
    values = [v for one in series for v in one.points.values]
    return [Lines(name, name, series, base=base(values), x_title=_OVER.get(name, "step"))]


def _pairs(curve: Curve) -> list[tuple[float, float]]:
    return sorted(zip(curve.x, curve.y, strict=True), key=lambda pair: pair[0])
