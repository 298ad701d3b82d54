"""What a report says of a measurement of the machine or of a lesson: its sentence, its figures as
tables and charts, and what it does not show.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from ampscope import records
from ampscope.analysis.telemetry import others_bound, spoiled
from ampscope.analysis.tensor_core_use import answer, core_use, shapes
from ampscope.analysis.training import finite_parts
from ampscope.extensions import load
from ampscope.measurements import KINDS
from ampscope.number_words import binary_size, number, percent, plural, rate_words, seconds
from ampscope.numerics.formats import FP16
from ampscope.store.reader import Reader
from ampscope.story import document, shared
from ampscope.story import document as doc
from ampscope.story.run_words import rules
from ampscope.story.shared import base, listed, looks

Said = tuple[str, tuple[doc.Block, ...]]

# What a lesson measured, as tables and charts; what it means stands on the lesson's own page.


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


def lesson_told(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    """The title, and what was measured."""
    asked = ", ".join(f"{name} {value}" for name, value in run.spec.settings)
    title = f"Lesson {run.spec.workload}{f' ({asked})' if asked else ''}: measured."
    return title, _by_type(results)


def _told_by_type(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    """Of a kind whose extension is not here."""
    return f"Measurement ({run.spec.kind}).", _by_type(results)


def _by_type(results: Sequence[records.Result]) -> tuple[doc.Block, ...]:
    kinds = dict.fromkeys(type(r) for r in results if not isinstance(r, _DRAWN))
    blocks: list[doc.Block] = []
    for kind in kinds:
        blocks += _table([r for r in results if type(r) is kind])
    curves = [r for r in results if isinstance(r, records.Curve)]
    for name in dict.fromkeys(curve.name for curve in curves):
        blocks += _curves(name, [c for c in curves if c.name == name])
    blocks += [
        document.HistogramChart(f"{h.name}, {h.series}, {h.dtype}", np.array(h.row, np.int64), FP16)
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


SERIES = {
    "ceiling": "Matmuls of random matrices",
    "copy": "Copies",
    "align_m": "Misaligned m",
    "align_n": "Misaligned n",
    "align_k": "Misaligned k",
    "align_channels": "Misaligned channels",
}


def part(reader: Reader, run: records.RunInfo, points: int) -> doc.Part:
    """Its verdict, its table, what disturbed it, and the machine."""
    results = reader.results(run.id)
    kind = KINDS.get(run.spec.kind)
    told: Callable[..., Said] = load(kind.told) if kind else _told_by_type
    title, blocks = told(run, results) if results else ("Nothing was measured.", ())
    disturbed = spoiled(reader.samples(run.id), others_bound(run.spec))
    said: list[doc.Block] = [doc.Paragraph(line, "Disturbed.") for line in disturbed]
    said += [doc.Paragraph(run.message)] if run.message else []
    if run.traceback:
        said.append(doc.Fold("The run's own traceback", (doc.Code(run.traceback),)))
    verdict_blocks = tuple(said) or (doc.Paragraph("Nothing that was read disturbed it."),)
    sections = [doc.Section("Verdict", verdict_blocks)]
    if blocks:
        sections.append(doc.Section("Measured", blocks))
    missing = of_measurement(reader, run, results)
    sections.append(doc.Section("What is missing", missing))
    sections += shared.origin_sections([run], run)
    return doc.Part(title or shared.subject(run), shared.subject(run), tuple(sections))


def cores_told(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    use = core_use(results, run.machine)
    if use is None or not use.uses:
        return "The step's matmuls were not measured.", ()
    rows = tuple(
        (
            one.matmul.op,
            one.matmul.dtype,
            shapes(one.matmul.operands),
            f"{one.matmul.count:,}",
            "" if one.matmul.flops_s is None else rate_words(one.matmul.flops_s),
            str(one.verdict),
            one.eligibility.reason,
        )
        for one in use.uses
    )
    columns = ("Op", "Computed in", "Shapes", "Calls", "Reached", "Matrix units", "Why")
    return answer(use), (doc.Table(columns, rows, numeric=(3, 4)),)


def bench_told(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    rates = [r for r in results if isinstance(r, records.Rate)]
    best: dict[str, float] = {}
    for rate in rates:
        if rate.series == "ceiling" and rate.flops_s is not None:
            best[rate.dtype] = max(best.get(rate.dtype, 0.0), rate.flops_s)
    told = "; ".join(f"{dtype} {rate_words(reached)}" for dtype, reached in best.items())
    blocks = [
        doc.Fold(title, (rate_tables([r for r in rates if r.series == name]),))
        for name, title in SERIES.items()
        if any(r.series == name for r in rates)
    ]
    return f"Best rate of a matmul by dtype: {told or 'none was measured'}.", tuple(blocks)


# What the report of a measurement does not show, and why.


Gaps: TypeAlias = Iterator[tuple[str, str]]
NO_COUNTER = "No counter of energy could be read: NVML's on a GPU, RAPL's on a CPU."


def of_measurement(
    reader: Reader, run: records.RunInfo, results: Sequence[records.Result]
) -> tuple[doc.Block, ...]:
    """Of a run that measures the machine, or what a lesson shows."""
    kind = KINDS.get(run.spec.kind)
    of_kind: Gaps = load(kind.gaps)(run, results) if kind and kind.gaps else iter(())
    found = [*_of_run(reader, run, results), *of_kind]
    return listed(found, "Nothing that this kind of measurement has is missing.")


def _of_run(reader: Reader, run: records.RunInfo, results: Sequence[records.Result]) -> Gaps:
    if run.state is not records.State.FINISHED:
        yield "The rest of the measurement", f"It is {run.state}. {run.message}".strip()
    elif not results:
        yield "Every figure", "The run ended and left no result."
    machine = run.machine
    if machine is not None and machine.policy != "cuda":
        yield "A GPU", f"It ran under {rules(run)}; times say nothing about a GPU."
    unmeasured = [
        r for r in results if isinstance(r, records.Rate | records.Matmul) and r.timing is None
    ]
    if unmeasured:
        why = "; ".join(dict.fromkeys(r.note for r in unmeasured if r.note))
        yield plural(len(unmeasured), "rate"), why or "They could not be measured here."
    if not reader.samples(run.id, 2):
        yield "Telemetry", "Load, memory and clocks of the machine were not read beside this run."


def cores_gaps(run: records.RunInfo, results: Sequence[records.Result]) -> Gaps:
    step = next((r for r in results if isinstance(r, records.StepMatmuls)), None)
    matmuls = [r for r in results if isinstance(r, records.Matmul)]
    if step is not None and len(matmuls) < step.distinct:
        left = step.distinct - len(matmuls)
        yield plural(left, "matmul"), "They were not reached before the run ended."
    if step is not None and step.kernel_source == "none":
        yield "Names of kernels", "On this device there is no record of which kernels ran."
    alone = [p for p in matmuls if p.timing and not p.control and p.dtype in ("bf16", "fp16")]
    if alone:
        yield f"fp32 beside {plural(len(alone), 'matmul')}", "It could not be run in fp32."


def lesson_gaps(run: records.RunInfo, results: Sequence[records.Result]) -> Gaps:
    more = len(histograms(results)) - MOST_HISTOGRAMS
    if more > 0:
        yield plural(more, "histogram"), f"The first {MOST_HISTOGRAMS} are drawn."
    if any(isinstance(r, records.MemorySplit) and r.device_peak is None for r in results):
        yield "Memory by the allocator", "CUDA's alone says what it holds; tensors were followed."
    slow = [r for r in results if isinstance(r, records.Reading) and r.name == "too slow here"]
    if slow:
        what = f"{plural(len(slow), 'rate')}, of {', '.join(dict.fromkeys(r.series for r in slow))}"
        yield what, "One call alone took too long; how long stands among the numbers."
    timed = any(isinstance(r, records.StepTimes) for r in results)
    if run.spec.workload == "cost" and timed:
        if not any(isinstance(r, records.EnergyUse) for r in results):
            yield "Energy", NO_COUNTER
        yield "Money", "Prices are typed in on the lesson's page, and are no part of the run."


# Results of measurements as tables, one a type: for every type of
# :mod:`ampscope.records`, so that no result of a lesson can stay out of its report.


NOT_SHOWN = ("measured_at", "is_base")  # when, and of a comparison's own order
Rows: TypeAlias = Sequence[records.Result]


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
