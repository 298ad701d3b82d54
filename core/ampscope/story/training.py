"""What a report says of one recorded training: a probe, or a rank of a watched training."""

from __future__ import annotations

from pathlib import PurePath

from ampscope.analysis.op_precision import recorded_dtypes
from ampscope.analysis.scale_summary import summarize
from ampscope.analysis.training import Training, finite_parts, training_of
from ampscope.number_words import plural, share
from ampscope.records import (
    Event,
    ModuleRecord,
    Role,
    RunInfo,
    ShadowRecord,
    StepRecord,
    StepTotals,
)
from ampscope.store.reader import Reader
from ampscope.store.series import last_shadow_step
from ampscope.story import document as doc
from ampscope.story import shared
from ampscope.story import training_words as words
from ampscope.story.palette import MEASURE
from ampscope.story.shared import base

MOST_ROWS = 40
MOST_EVENTS = 60


def part(reader: Reader, run: RunInfo, points: int) -> doc.Part:
    """Its verdict, curves, scale, histograms, what it reported, and what is missing."""
    training = training_of(
        run, reader.overview(run.id, points), reader.step_totals(run.id), reader.events(run.id)
    )
    modules = reader.modules(run.id)
    sections = [doc.Section("Verdict", _verdict(training))]
    if training.steps:
        sections.append(doc.Section("Loss and gradients", _curves(training)))
    sections += scale_sections(reader, run, points)
    sections += shared.histogram_sections(reader, run, None, training.bad_since)
    newest = last_shadow_step(reader, run.id)
    if newest is not None:
        shadows = reader.shadows(run.id, step=newest)
        sections.append(doc.Section("Against the fp32 shadow", _shadow(shadows, modules)))
    if training.events:
        sections.append(doc.Section("What it reported", _events(training.events)))
    if modules:
        sections.append(doc.Section("Modules", _modules(reader, run, modules)))
    sections.append(doc.Section("What is missing", shared.of_run(reader, run)))
    sections += shared.origin_sections([run], run)
    return doc.Part(_answer(training), shared.subject(run), tuple(sections))


def _answer(training: Training) -> str:
    if training.run.spec.kind == "watch" or not training.steps:
        return words.answer(training)
    return sentence(training.steps, training.totals)


def _verdict(training: Training) -> tuple[doc.Block, ...]:
    run = training.run
    blocks: list[doc.Block] = [doc.Paragraph(words.answer(training))]
    if run.message:
        blocks.append(doc.Paragraph(run.message))
    if training.last is not None:
        blocks.append(doc.Figures(tuple(words.key_figures(training))))
    if run.traceback:
        blocks.append(doc.Fold("The run's own traceback", (doc.Code(run.traceback),)))
    return tuple(blocks)


def _curves(training: Training) -> tuple[doc.Block, ...]:
    steps, whole = training.steps, training.totals.steps
    blocks: list[doc.Block] = []
    for title, values in (
        ("Loss", [s.loss for s in steps]),
        ("Gradient norm", [s.grad_norm for s in steps]),
        ("Gradient norm before the clip", [s.unclipped_norm for s in steps]),
    ):
        parts = finite_parts([s.step for s in steps], values)
        if parts.steps or parts.nonfinite_count:
            series = doc.Series(title.lower(), parts, MEASURE)
            blocks.append(doc.Lines(title, title.lower(), (series,), base=base(parts.values)))
    if len(steps) < whole:
        blocks.append(doc.Paragraph(thinned(len(steps), whole)))
    return tuple(blocks) or (doc.Paragraph("Neither loss nor gradient norm was recorded."),)


def _shadow(shadows: list[ShadowRecord], modules: list[ModuleRecord]) -> tuple[doc.Block, ...]:
    """Of one step, most lost first."""
    here = [s for s in shadows if s.role is Role.GRAD_OUTPUT] or shadows
    names = {m.index: m.path or m.type for m in modules}
    here.sort(key=lambda s: (-s.lost / max(1, s.total), -s.subnormal, s.module))
    lost, total = sum(s.lost for s in here), sum(s.total for s in here)
    below = sum(s.below_range for s in here)
    said = (
        f"Step {here[0].step:,}, {here[0].role.replace('_', ' ')}: {share(lost, total)} were lost: "
        "zero as recorded, and not zero in an fp32 copy of the same step."
    )
    if lost:
        said += (
            f" Of these, {share(below, lost)} are below the format's range; the others "
            "cancelled or flipped: the format holds values of that size."
        )
    rows = tuple(
        (
            names.get(s.module) or f"module {s.module}",
            share(s.lost, s.total),
            share(s.below_range, s.total),
            share(s.cancelled, s.total),
            share(s.subnormal, s.total),
            share(s.zero_before, s.total),
        )
        for s in here[:MOST_ROWS]
    )
    columns = ("Module", "Lost", "Below range", "Cancelled or flipped", "Subnormal", "Zero in both")
    table = doc.Table(columns, rows, numeric=(1, 2, 3, 4, 5))
    return (doc.Paragraph(said), doc.Fold("By module", (table,)))


def _events(events: list[Event]) -> tuple[doc.Block, ...]:
    """The newest; of a capsule the name of its file."""
    shown = events[-MOST_EVENTS:]
    rows = tuple(
        (f"{e.step:,}", e.kind, e.name, f"{e.text} {PurePath(e.path).name}".strip()) for e in shown
    )
    blocks: list[doc.Block] = [doc.Table(("Step", "Kind", "Which", "Said"), rows, numeric=(0,))]
    if len(shown) < len(events):
        blocks.append(doc.Paragraph(f"The newest {len(shown):,} of {len(events):,} are listed."))
    return tuple(blocks)


def _modules(reader: Reader, run: RunInfo, modules: list[ModuleRecord]) -> tuple[doc.Block, ...]:
    """Dtypes in which weights, activations and gradients really flowed."""
    flowed = {role: _dtypes(reader, run, role) for role in (Role.ACTIVATION, Role.GRAD_OUTPUT)}
    leaves = [m for m in modules if m.is_leaf]
    rows = tuple(
        (
            m.path or m.type,
            m.type,
            m.weight_dtypes or "none",
            flowed[Role.ACTIVATION].get(m.index, "not recorded"),
            flowed[Role.GRAD_OUTPUT].get(m.index, "not recorded"),
            f"{m.parameter_count:,}",
        )
        for m in leaves[:MOST_ROWS]
    )
    columns = ("Module", "Type", "Weights", "Activations", "Output gradients", "Parameters")
    title = f"Dtypes of {plural(len(leaves), 'module')} without modules below"
    if len(leaves) > MOST_ROWS:
        title += f", the first {MOST_ROWS}"
    return (doc.Fold(title, (doc.Table(columns, rows, numeric=(5,)),)),)


def _dtypes(reader: Reader, run: RunInfo, role: Role) -> dict[int, str]:
    spans = reader.frame_spans(run.id, role)
    frame = reader.frame(run.id, role, spans[-1][0]) if spans else None
    found = recorded_dtypes(frame) if frame is not None else {}
    return {module: "+".join(dtypes) for module, dtypes in found.items()}


def scale_sections(reader: Reader, run: RunInfo, points: int) -> list[doc.Section]:
    """The loss scale over the steps of a run, with the steps that GradScaler left out; none where
    no step was recorded."""
    steps = reader.overview(run.id, points)
    if not steps:
        return []
    totals = reader.step_totals(run.id)
    loss = finite_parts([s.step for s in steps], [s.loss for s in steps])
    summary = summarize(steps)
    blocks: list[doc.Block] = [doc.Paragraph(words.scale_answer(summary, totals, loss))]
    scaled = [s for s in steps if s.scale is not None]
    if scaled:
        blocks.append(doc.Figures(tuple(words.scale_figures(summary, totals, loss, steps))))
        parts = finite_parts([s.step for s in scaled], [s.scale for s in scaled])
        skipped = tuple(s.step for s in steps if s.skipped)
        series = doc.Series("loss scale", parts, MEASURE, skipped=skipped, is_stepped=True)
        blocks.append(doc.Lines("Loss scale", "loss scale", (series,), base=2))
    if len(steps) < totals.steps:
        blocks.append(doc.Paragraph(thinned(len(steps), totals.steps)))
    return [doc.Section("Loss scale", tuple(blocks))]


def sentence(steps: list[StepRecord], totals: StepTotals) -> str:
    """The skips, what they are, and where the scale stands."""
    loss = finite_parts([s.step for s in steps], [s.loss for s in steps])
    return words.scale_answer(summarize(steps), totals, loss)


def thinned(shown: int, whole: int) -> str:
    """Which steps stand for the others."""
    return (
        f"{shown:,} of {whole:,} steps are drawn: the extremes, changes of scale and bad steps. "
        "Nothing is smoothed; the counts are of all steps."
    )
