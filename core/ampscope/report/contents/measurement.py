"""What a report says of a measurement of the machine: its sentence, and its figures as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampscope.analysis.core_use import core_use
from ampscope.analysis.core_words import answer
from ampscope.analysis.loss_scale import finite_parts
from ampscope.analysis.product_layout import shapes
from ampscope.analysis.telemetry import others_bound, spoiled
from ampscope.compare import batches, views
from ampscope.compare.figures import figures, seconds, size
from ampscope.compare.verdict import verdict
from ampscope.hardware.bench_view import rate_words
from ampscope.records import Rate, Result, RunInfo
from ampscope.report.colours import of_dtype
from ampscope.report.contents import lesson, measurement_gaps, origin, result_tables
from ampscope.report.contents.looks import DASHES
from ampscope.report.document import (
    Block,
    Code,
    Fold,
    Lines,
    Paragraph,
    Part,
    Section,
    Series,
    Table,
)
from ampscope.store.reader import Reader

SERIES = {
    "ceiling": "Products of random matrices",
    "copy": "Copies",
    "align_m": "Crooked m",
    "align_n": "Crooked n",
    "align_k": "Crooked k",
    "align_channels": "Crooked channels",
}
Said = tuple[str, tuple[Block, ...]]


def part(reader: Reader, run: RunInfo, points: int) -> Part:
    """Its verdict, its table, what disturbed it, and the machine."""
    results = reader.results(run.id)
    told = _TOLD.get(run.spec.kind)
    title, blocks = told(run, results) if told and results else ("Nothing was measured.", ())
    disturbed = spoiled(reader.samples(run.id), others_bound(run.spec))
    said: list[Block] = [Paragraph(line, "Disturbed.") for line in disturbed]
    said += [Paragraph(run.message)] if run.message else []
    if run.traceback:
        said.append(Fold("The run's own traceback", (Code(run.traceback),)))
    verdict_blocks = tuple(said) or (Paragraph("Nothing that was read disturbed it."),)
    sections = [Section("Verdict", verdict_blocks)]
    if blocks:
        sections.append(Section("Measured", blocks))
    missing = measurement_gaps.of_measurement(reader, run, results)
    sections.append(Section("What is missing", missing))
    sections += origin.sections([run], run)
    return Part(title or origin.subject(run), origin.subject(run), tuple(sections))


def _compare(run: RunInfo, results: Sequence[Result]) -> Said:
    measured = views.by_precision(results)
    base = views.base_of(measured)
    if base is None or base.times is None:
        return "The comparison ended before the first steps were timed.", ()
    rows = tuple((label, *(cell(m) for m in measured)) for label, cell in figures(base))
    columns = ("", *(m.precision for m in measured))
    numeric = tuple(range(1, len(columns)))
    blocks: list[Block] = [Table(columns, tuple(r for r in rows if any(r[1:])), numeric)]
    series = tuple(
        Series(
            f"{m.precision}, seed {curve.seed}",
            finite_parts(range(len(curve.losses)), curve.losses),
            of_dtype(m.precision),
            DASHES[n % len(DASHES)],
            curve.skipped,
        )
        for m in measured
        for n, curve in enumerate(m.curves)
    )
    if series:
        blocks.append(Lines("Loss by precision and seed", "loss", series, x_title="step"))
    return verdict(measured).sentence, tuple(blocks)


def _batch(run: RunInfo, results: Sequence[Result]) -> Said:
    searches = batches.by_precision(results)
    rows = tuple(
        (
            search.precision,
            f"{t.samples:,}",
            "fits" if t.fits else f"does not fit: {t.how_it_ended}",
            "" if t.peak_bytes is None else size(t.peak_bytes),
            "" if t.step is None else seconds(t.step.median_s),
            "" if t.samples_s is None else f"{t.samples_s:,.0f}",
        )
        for search in searches
        for t in search.tries
    )
    columns = ("Precision", "Samples", "Seen", "Peak of tensors", "A step", "Samples a second")
    return batches.sentence(searches), (Table(columns, rows, numeric=(1, 3, 4, 5)),)


def _cores(run: RunInfo, results: Sequence[Result]) -> Said:
    use = core_use(results, run.machine)
    if use is None or not use.uses:
        return "The step's products were not measured.", ()
    rows = tuple(
        (
            one.product.op,
            one.product.dtype,
            shapes(one.product.operands),
            f"{one.product.count:,}",
            "" if one.product.flops_s is None else rate_words(one.product.flops_s),
            str(one.verdict),
            one.eligibility.reason,
        )
        for one in use.uses
    )
    columns = ("Op", "Computed in", "Shapes", "Calls", "Reached", "Matrix units", "Why")
    return answer(use), (Table(columns, rows, numeric=(3, 4)),)


def _bench(run: RunInfo, results: Sequence[Result]) -> Said:
    rates = [r for r in results if isinstance(r, Rate)]
    best: dict[str, float] = {}
    for rate in rates:
        if rate.series == "ceiling" and rate.flops_s is not None:
            best[rate.dtype] = max(best.get(rate.dtype, 0.0), rate.flops_s)
    told = "; ".join(f"{dtype} {rate_words(reached)}" for dtype, reached in best.items())
    blocks = [
        Fold(title, (result_tables.rates([r for r in rates if r.series == name]),))
        for name, title in SERIES.items()
        if any(r.series == name for r in rates)
    ]
    return f"Best rate of a product by dtype: {told or 'none was measured'}.", tuple(blocks)


_TOLD: dict[str, Callable[[RunInfo, Sequence[Result]], Said]] = {
    "compare": _compare,
    "batch": _batch,
    "cores": _cores,
    "bench": _bench,
    "lesson": lesson.told,
}
