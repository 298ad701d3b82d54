"""The loss scale over the steps of a run, with the steps that GradScaler left out."""

from __future__ import annotations

from ampscope.analysis.loss_scale import finite_parts, summarize
from ampscope.records import RunInfo, StepRecord, StepTotals
from ampscope.report.colours import MEASURE
from ampscope.report.document import Block, Figure, Figures, Lines, Paragraph, Section, Series
from ampscope.report.words import loss_scale
from ampscope.report.words.numbers import power_of_two, share
from ampscope.store.reader import Reader


def sections(reader: Reader, run: RunInfo, points: int) -> list[Section]:
    """None where no step was recorded."""
    steps = reader.overview(run.id, points)
    if not steps:
        return []
    totals = reader.step_totals(run.id)
    blocks: list[Block] = [Paragraph(sentence(steps, totals))]
    scaled = [s for s in steps if s.scale is not None]
    if scaled:
        blocks.append(_figures(scaled, totals))
        parts = finite_parts([s.step for s in scaled], [s.scale for s in scaled])
        skipped = tuple(s.step for s in steps if s.skipped)
        series = Series("loss scale", parts, MEASURE, skipped=skipped, is_stepped=True)
        blocks.append(Lines("Loss scale", "loss scale", (series,), base=2))
    if len(steps) < totals.steps:
        blocks.append(Paragraph(thinned(len(steps), totals.steps)))
    return [Section("Loss scale", tuple(blocks))]


def sentence(steps: list[StepRecord], totals: StepTotals) -> str:
    """The skips, what they are, and where the scale stands."""
    loss = finite_parts([s.step for s in steps], [s.loss for s in steps])
    return loss_scale.answer(summarize(steps), totals, loss)


def thinned(shown: int, whole: int) -> str:
    """Which steps stand for the others."""
    return (
        f"{shown:,} of {whole:,} steps are drawn: the extremes, changes of scale and bad steps. "
        "Nothing is smoothed; the counts are of all steps."
    )


def _figures(scaled: list[StepRecord], totals: StepTotals) -> Figures:
    first, last = scaled[0].scale or 0.0, totals.last_scale or 0.0
    return Figures(
        (
            Figure("First scale", power_of_two(first), f"{first:,.10g}"),
            Figure("Last scale", power_of_two(last), f"{last:,.10g}"),
            Figure("Skipped", share(totals.skipped, totals.steps)),
        )
    )
