"""What a report says of a comparison and of a batch search: the answer, its figures, and what it
does not show."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope import records
from ampscope.analysis.training import finite_parts
from ampscope.ext.compare import batches, comparison
from ampscope.ext.compare.verdict import verdict
from ampscope.number_words import binary_size, seconds
from ampscope.story import document as doc
from ampscope.story.measurement import NO_COUNTER, Gaps, Said
from ampscope.story.palette import dtype_color
from ampscope.story.shared import DASHES

OF_A_SCRIPT = "It is read where ampscope makes the steps itself, not of a script."


def comparison_told(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    measured = comparison.by_precision(results)
    base = comparison.base_of(measured)
    if base is None or base.times is None:
        return "The comparison ended before the first steps were timed.", ()
    rows = tuple((label, *cells) for label, cells in comparison.figure_rows(measured))
    columns = ("", *(m.precision for m in measured))
    numeric = tuple(range(1, len(columns)))
    blocks: list[doc.Block] = [doc.Table(columns, rows, numeric)]
    series = tuple(
        doc.Series(
            f"{m.precision}, seed {curve.seed}",
            finite_parts(range(len(curve.losses)), curve.losses),
            dtype_color(m.precision),
            DASHES[n % len(DASHES)],
            curve.skipped,
        )
        for m in measured
        for n, curve in enumerate(m.curves)
    )
    if series:
        blocks.append(doc.Lines("Loss by precision and seed", "loss", series, x_title="step"))
    return verdict(measured).sentence, tuple(blocks)


def comparison_gaps(run: records.RunInfo, results: Sequence[records.Result]) -> Gaps:
    for name in run.spec.precisions:
        wanted = (
            ("Steps", records.StepTimes),
            ("Losses", records.LossCurve),
            ("Split memory", records.MemorySplit),
        )
        of_it = [r for r in results if getattr(r, "precision", None) == name]
        for what, kind in wanted:
            if not any(isinstance(r, kind) for r in of_it):
                yield f"{what} in {name}", _why_not_compared(of_it, kind)
    is_script = any(isinstance(r, records.ProcessPeak) for r in results)
    if run.state is records.State.FINISHED and not any(
        isinstance(r, records.EnergyUse) for r in results
    ):
        yield "Energy", OF_A_SCRIPT if is_script else NO_COUNTER


def _why_not_compared(of_it: Sequence[records.Result], kind: type[records.Result]) -> str:
    if kind is records.MemorySplit and any(isinstance(r, records.ProcessPeak) for r in of_it):
        return "Of a script the peak of the whole process is measured, which cannot be split."
    return "None was recorded; what ended the run, or was refused here, is stated above."


def search_told(run: records.RunInfo, results: Sequence[records.Result]) -> Said:
    searches = batches.batches_by_precision(results)
    rows = tuple(
        (
            search.precision,
            f"{t.samples:,}",
            "fits" if t.fits else f"does not fit: {t.how_it_ended}",
            "" if t.peak_bytes is None else binary_size(t.peak_bytes),
            "" if t.step is None else seconds(t.step.median_s),
            "" if t.samples_s is None else f"{t.samples_s:,.0f}",
        )
        for search in searches
        for t in search.trials
    )
    columns = ("Precision", "Samples", "Seen", "Peak of tensors", "A step", "Samples per second")
    return batches.sentence(searches), (doc.Table(columns, rows, numeric=(1, 3, 4, 5)),)


def search_gaps(run: records.RunInfo, results: Sequence[records.Result]) -> Gaps:
    ended = {r.precision: r for r in results if isinstance(r, records.LargestBatch)}
    for name in run.spec.precisions:
        if name not in ended:
            yield f"The largest batch in {name}", "Its search did not end."
        elif ended[name].too_many is None:
            yield f"A batch that is too large in {name}", "No trial failed to fit."
    if any(isinstance(r, records.BatchTrial) and r.fits and r.step is None for r in results):
        yield "Times of some trials", "They fitted into memory, and were not timed."
