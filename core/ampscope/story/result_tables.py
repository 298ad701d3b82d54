"""Results of a measurement as tables, one a type, as charts and as histograms: for every type of
:mod:`ampscope.records`, so that no result can stay out of its report.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ampscope import records
from ampscope.analysis.training import finite_parts
from ampscope.number_words import binary_size, number, percent, plural, rate_words, seconds
from ampscope.numerics.formats import FP16
from ampscope.story import document as doc
from ampscope.story.shared import base, looks

Rows: TypeAlias = Sequence[records.Result]
MOST_HISTOGRAMS = 6
MOST_POINTS = 2_000  # of a curve: about two a pixel on paper
OPEN_ROWS = 12
_DRAWN = (records.Curve, records.Histogram)  # every other type is a table
_OVER = {  # what x counts, where that is not steps
    "spacing": "exponent of two",
    "unchanged": "step, as an exponent of two of the weight",
    "sum": "terms",
    "error": "length",
    "running variance": "standard deviation",
}
_TITLES = {
    "Rate": "What matmuls reached",
    "StepTimes": "Time of a training step",
    "MemorySplit": "Memory at the peak of a training step",
    "EnergyUse": "Energy",
    "Reading": "Numbers",
    "UnderflowCounts": "What became of the elements",
    "NonFiniteCounts": "What tensors held",
    "Call": "Calls of ops",
}
NOT_SHOWN = ("measured_at", "is_base")  # when, and of a comparison's own order


def by_type(results: Sequence[records.Result]) -> tuple[doc.Block, ...]:
    kinds = dict.fromkeys(type(r) for r in results if not isinstance(r, _DRAWN))
    blocks: list[doc.Block] = []
    for kind in kinds:
        blocks += _table([r for r in results if type(r) is kind])
    curves = [r for r in results if isinstance(r, records.Curve)]
    for name in dict.fromkeys(curve.name for curve in curves):
        blocks += _curves(name, [c for c in curves if c.name == name])
    blocks += [
        doc.HistogramChart(f"{h.name}, {h.series}, {h.dtype}", np.array(h.row, np.int64), FP16)
        for h in histograms(results)[:MOST_HISTOGRAMS]
    ]
    return tuple(blocks)


def histograms(results: Sequence[records.Result]) -> list[records.Histogram]:
    """All of them; a report draws the first :data:`MOST_HISTOGRAMS`."""
    return [r for r in results if isinstance(r, records.Histogram)]


def _table(results: Sequence[records.Result]) -> list[doc.Block]:
    """Open where it is short: of some lessons it is the whole answer."""
    kind = type(results[0]).__name__
    title = f"{_TITLES.get(kind, kind)}, {plural(len(results), 'result')}"
    if len(results) <= OPEN_ROWS:
        return [doc.Paragraph(f"{title}."), table(results)]
    return [doc.Fold(title, (table(results),))]


def _curves(name: str, curves: Sequence[records.Curve]) -> list[doc.Block]:
    """Over whole numbers; another x has no place on the axis of a report."""
    if not all(float(x).is_integer() and abs(x) < 1e15 for c in curves for x in c.x):
        rows = tuple((c.series, number(x), number(y)) for c in curves for x, y in _pairs(c))
        return [doc.Fold(name, (doc.Table(("Case", "x", name), rows, numeric=(1, 2)),))]
    series = tuple(
        doc.Series(
            c.series,
            finite_parts([int(x) for x, _ in _pairs(c)], [y for _, y in _pairs(c)]),
            colour,
            dash,
        )
        for c, (colour, dash) in zip(curves, looks([c.series for c in curves]), strict=True)
    )
    values = [v for one in series for v in one.points.values]
    return [doc.Lines(name, name, series, base=base(values), x_title=_OVER.get(name, "step"))]


def _pairs(curve: records.Curve) -> list[tuple[float, float]]:
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


def table(results: Rows) -> doc.Table:
    """Of results of one type."""
    special = _SPECIAL.get(type(results[0]))
    return special(results) if special is not None else _by_fields(results)


def rate_tables(results: Rows) -> doc.Table:
    """What ops reached."""
    found = [r for r in results if isinstance(r, records.Rate)]
    rows = tuple(
        (
            r.op,
            r.dtype,
            "×".join(map(str, r.shape)),
            _reached(r),
            "" if r.timing is None else seconds(r.timing.median_s),
            "" if r.timing is None else quartiles(r.timing).partition(" (")[0],
            r.note,
        )
        for r in found
    )
    columns = ("Op", "Dtype", "Shape", "Reached", "Median", "Quartiles", "Note")
    return doc.Table(columns, rows, numeric=(3, 4, 5))


def _times(results: Rows) -> doc.Table:
    found = [r for r in results if isinstance(r, records.StepTimes)]
    rows = tuple(
        (
            r.precision,
            seconds(r.step.median_s),
            quartiles(r.step),
            *(_median(phase) for phase in (r.forward, r.backward, r.optimizer)),
            f"{r.samples_s:,.0f}" if r.samples else "",
            "" if r.cast_share is None else percent(r.cast_share),
        )
        for r in found
    )
    columns = (
        "Precision", "A step", "Quartiles", "Forward", "Backward", "Optimizer",
        "Samples per second", "Casts, of the time in ops",
    )  # fmt: skip
    return doc.Table(columns, rows, numeric=tuple(range(1, len(columns))))


def _memory(results: Rows) -> doc.Table:
    """A column each: precisions beside each other, and ten parts below one another."""
    found = [r for r in results if isinstance(r, records.MemorySplit)]
    parts: tuple[tuple[str, Callable[[records.MemorySplit], int | None]], ...] = (
        ("At the peak", lambda r: r.peak),
        ("Weights", lambda r: r.weights),
        ("Gradients", lambda r: r.gradients),
        ("Optimizer state", lambda r: r.optimizer_state),
        ("Activations", lambda r: r.activations),
        ("Cast copies", lambda r: r.cast_copies),
        ("Temporaries", lambda r: r.temporaries),
        ("The batch", lambda r: r.inputs),
        ("By the allocator", lambda r: r.device_peak),
    )
    sizes = [(name, *(_size(part(r)) for r in found)) for name, part in parts]
    rows = (("Samples", *(f"{r.samples:,}" for r in found)), *sizes)
    return doc.Table(("", *(r.precision for r in found)), rows, tuple(range(1, len(found) + 1)))


def _energy(results: Rows) -> doc.Table:
    found = [r for r in results if isinstance(r, records.EnergyUse)]
    rows = tuple(
        (r.precision, f"{r.joules:.4g} J", f"{r.steps:,}", f"{r.joules / r.steps:.3g} J", r.source)
        for r in found
    )
    columns = ("Precision", "Energy", "Steps", "A step", "Read from")
    return doc.Table(columns, rows, numeric=(1, 2, 3))


def _by_fields(results: Rows) -> doc.Table:
    fields = [f for f in dataclasses.fields(results[0]) if f.name not in NOT_SHOWN]
    rows = tuple(tuple(_cell(getattr(r, f.name)) for f in fields) for r in results)
    numeric = tuple(n for n, f in enumerate(fields) if f.type in ("int", "float"))
    return doc.Table(tuple(f.name.replace("_", " ") for f in fields), rows, numeric)


def quartiles(timing: records.Timing) -> str:
    """ "180–191 ms (56 steps)" """
    factor, unit = (1e3, "ms") if timing.high_s < 1 else (1.0, "s")
    low, high = timing.low_s * factor, timing.high_s * factor
    return f"{low:.3g}–{high:.3g} {unit} ({timing.repeats} steps)"


def _cell(value: object) -> str:
    if isinstance(value, records.Timing):
        return f"{seconds(value.median_s)}, {quartiles(value)}"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def _size(count: int | None) -> str:
    return "not read" if count is None else binary_size(count)


def _median(timing: records.Timing | None) -> str:
    return "" if timing is None else seconds(timing.median_s)


def _reached(rate: records.Rate) -> str:
    if rate.flops_s is not None:
        return rate_words(rate.flops_s)
    return "" if rate.bytes_s is None else f"{rate.bytes_s / 1e9:,.1f} GB/s"


_SPECIAL: dict[type[records.Result], Callable[[Rows], doc.Table]] = {
    records.Rate: rate_tables,
    records.StepTimes: _times,
    records.MemorySplit: _memory,
    records.EnergyUse: _energy,
}
