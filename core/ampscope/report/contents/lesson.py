"""What a lesson measured, as tables and charts; what it means stands on the lesson's own page."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ampscope.analysis.loss_scale import finite_parts
from ampscope.formats import FP16
from ampscope.records import Curve, Histogram, Result, RunInfo
from ampscope.report import document
from ampscope.report.contents.looks import base, looks
from ampscope.report.contents.result_tables import table
from ampscope.report.document import Block, Fold, Lines, Paragraph, Series, Table
from ampscope.report.words.numbers import number, plural

MOST_HISTOGRAMS = 6
MOST_POINTS = 2_000  # of a curve: about two a pixel on paper
OPEN_ROWS = 12
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
    blocks: list[Block] = []
    for kind in kinds:
        blocks += _table([r for r in results if type(r) is kind])
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


def _table(results: Sequence[Result]) -> list[Block]:
    """Open where it is short: of some lessons it is the whole answer."""
    kind = type(results[0]).__name__
    title = f"{_TITLES.get(kind, kind)}, {plural(len(results), 'result')}"
    if len(results) <= OPEN_ROWS:
        return [Paragraph(f"{title}."), table(results)]
    return [Fold(title, (table(results),))]


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
    """In the order of x; of very many the lowest and the highest of each of equal parts."""
    pairs = sorted(zip(curve.x, curve.y, strict=True), key=lambda pair: pair[0])
    size = -(-len(pairs) // (MOST_POINTS // 2))
    if len(pairs) <= MOST_POINTS:
        return pairs
    kept: list[tuple[float, float]] = []
    for at in range(0, len(pairs), size):
        part = range(at, min(at + size, len(pairs)))
        finite = [n for n in part if math.isfinite(pairs[n][1])]
        bad = next((n for n in part if not math.isfinite(pairs[n][1])), None)
        shown = set() if bad is None else {bad}
        if finite:
            shown |= {
                min(finite, key=lambda n: pairs[n][1]),
                max(finite, key=lambda n: pairs[n][1]),
            }
        kept += [pairs[n] for n in sorted(shown)]
    return kept
