"""What a report says of a diagnosed script: the Diagnosis page's sections, in its words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.analysis.training import finite_parts
from ampscope.causes import CAUSES
from ampscope.control import Control
from ampscope.diagnosis.findings import Finding
from ampscope.diagnosis.load import load_diagnosis
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.number_words import number, share, value
from ampscope.records import RunInfo, StepRecord
from ampscope.report import fix_words
from ampscope.report import verdict_words as words
from ampscope.report.contents import shared, training
from ampscope.report.contents.shared import base
from ampscope.report.document import (
    Block,
    Code,
    Figure,
    Figures,
    Fold,
    Lines,
    Paragraph,
    Part,
    Section,
    Series,
    Table,
)
from ampscope.report.palette import MEASURE, dtype_color
from ampscope.report.verdict_words import causal_chain
from ampscope.rules.verdict import Status
from ampscope.store.reader import Reader


def part(reader: Reader, info: RunInfo, points: int) -> Part:
    """The diagnosis that ``info`` belongs to. Raises BadInput while the baseline run still
    runs."""
    report = load_diagnosis(reader, info.id)
    head = report.runs.get("as_is", info)
    baseline = RunView(head.spec.control, head.id, reader.observations(head.id))
    findings = report.diagnosis.findings
    sections = [Section("Verdict", _verdict(report, baseline))]
    if findings:
        sections.append(Section("From the cause to what you see", _chain(report, baseline)))
        sections.append(Section("The fix", _fix(report)))
    recorded = recorded_controls(reader, report, points)
    sections.append(Section("The controls side by side", control_blocks(report, recorded)))
    if findings:
        sections.append(Section("Evidence", _evidence(report, findings[0])))
    sections += training.scale_sections(reader, head, points)
    found = findings[0].verdict if findings else None
    sections += shared.histogram_sections(
        reader, head, found.module if found else None, found.step if found else None
    )
    if findings[1:]:
        sections.append(Section("Also found", _others(report)))
    sections.append(Section("What is missing", shared.of_diagnosis(reader, report, head)))
    sections.append(Section("Every rule's answer", rule_blocks(report)))
    sections += shared.origin_sections(list(report.runs.values()) or [head], head)
    return Part(words.verdict(report, baseline), shared.subject(head), tuple(sections))


def _verdict(report: DiagnosisResult, baseline: RunView) -> tuple[Block, ...]:
    headline = words.headline(report)
    blocks: list[Block] = [Paragraph(headline)] if headline else []
    blocks.append(Paragraph(words.paragraph(report, baseline)))
    problem = words.could_not_run(report, baseline)
    findings = report.diagnosis.findings
    if findings and not problem and findings[0].verdict.code:
        blocks.append(Code(findings[0].verdict.code, "python"))
    blocks.append(Paragraph(words.next_step(report, baseline).rstrip(":"), "What to do."))
    if findings and not problem:
        blocks.append(_figures(report, findings[0]))
    outcome = baseline.outcome
    head = report.runs.get("as_is")
    trace = head.traceback if head is not None else ""
    if trace or outcome.error_text:
        text = trace or f"{outcome.error_type}: {outcome.error_text}"
        blocks.append(Fold("The script's own error", (Code(text),)))
    if report.notes:
        blocks.append(Paragraph(" ".join(report.notes)))
    return tuple(blocks)


def _figures(report: DiagnosisResult, finding: Finding) -> Figures:
    found = finding.verdict
    fix = fix_words.state(report)
    return Figures(
        (
            Figure("Where", found.module or found.line or "the whole script", found.op or ""),
            Figure("First seen at", "no step" if found.step is None else f"step {found.step:,}"),
            Figure("Fix", fix),
            Figure("In fp32", words.in_fp32(report)),
        )
    )


def _chain(report: DiagnosisResult, baseline: RunView) -> tuple[Block, ...]:
    links = causal_chain(report.diagnosis.findings[0], baseline, report.diagnosis.symptoms)
    rows = tuple(
        (str(n), link.title, link.detail, "" if link.step is None else f"{link.step:,}")
        for n, link in enumerate(links, 1)
    )
    return (Table(("", "What", "Detail", "Step"), rows, numeric=(3,)),)


def _fix(report: DiagnosisResult) -> tuple[Block, ...]:
    finding = report.diagnosis.findings[0]
    cured = fix_words.chosen(report)
    blocks: list[Block] = [Paragraph(fix_words.sentence(finding, cured))]
    patch = fix_words.patch(finding, cured)
    if patch:
        blocks.append(Code(patch, "python"))
    if report.trials:
        blocks.append(Paragraph(fix_words.seen(report)))
        rows = tuple(
            (
                Control(t.control).words,
                fix_words.outcome(t),
                f"{t.price:.2f} times" if t.price else "not known",
                f"{t.memory:.2f} times" if t.memory else "not known",
            )
            for t in report.trials
        )
        blocks.append(Table(("The script was run", "Seen", "Time per step", "Peak memory"), rows))
    return tuple(blocks)


def _evidence(report: DiagnosisResult, finding: Finding) -> tuple[Block, ...]:
    if not finding.verdict.evidence:
        return (Paragraph("The verdict rests on the script's own error."),)
    rows = tuple(
        (
            m.name,
            value(m.value),
            "" if m.threshold is None else value(m.threshold),
            Control(m.run or "as_is").words,
            "" if m.step is None else f"{m.step:,}",
            report.runs[m.run or "as_is"].id if (m.run or "as_is") in report.runs else "",
        )
        for m in finding.verdict.evidence
    )
    columns = ("Measured", "Value", "Limit", "Run", "Step", "Id")
    return (Table(columns, rows, numeric=(1, 2, 4)),)


def _others(report: DiagnosisResult) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for finding in report.diagnosis.findings[1:]:
        blocks.append(Paragraph(finding.verdict.reason, f"{CAUSES[finding.cause].title}."))
        if finding.verdict.fix.text:
            blocks.append(Paragraph(finding.verdict.fix.text, "What to do."))
        if finding.verdict.fix.patch:
            blocks.append(Code(finding.verdict.fix.patch, "python"))
    return tuple(blocks)


# Losses of the baseline run, in fp32, in bf16 and with the fix, over one axis of steps.


# The baseline has no dtype's colour: it may be fp16 in one part only.
_STYLES = {
    "as_is": (dtype_color("fp16"), ""),
    "fp32": (dtype_color("fp32"), "9 6"),
    "bf16": (dtype_color("bf16"), "2 4"),
}
_FIXED_STYLE = (MEASURE, "9 4 2 4")


@dataclass(frozen=True, slots=True)
class ControlRun:
    """One run beside the others: exact counts, and the steps that are drawn."""

    name: str
    run: RunInfo
    steps: list[StepRecord]
    step_count: int
    skipped: int
    bad_losses: int


def recorded_controls(reader: Reader, report: DiagnosisResult, points: int) -> list[ControlRun]:
    """The three controls, and the fix that worked (else the last that was tried)."""
    found = [(name, report.runs.get(word)) for name, word in fix_words.compared(report)]
    return [
        _read(reader, name, run, points)
        for name, run in found
        if run is not None and not run.state.is_active
    ]


def control_blocks(report: DiagnosisResult, found: list[ControlRun]) -> tuple[Block, ...]:
    """The chart and a row for each."""
    drawn = [c for c in found if c.steps]
    rows = tuple(
        (
            c.name,
            _last(c.steps),
            share(c.bad_losses, c.step_count),
            share(c.skipped, c.step_count),
            fix_words.went_wrong(report, c.run),
        )
        for c in found
    )
    columns = ("Control", "Last loss", "Losses not finite", "Skipped", "What went wrong")
    table = Table(columns, rows)
    if not drawn:
        return (Paragraph("No run made an optimizer step, so there is no loss to draw."), table)
    series = tuple(_series(c) for c in drawn)
    values = [v for s in series for v in s.points.values]
    return (Lines("Loss by control", "loss", series, base=base(values)), table)


def _read(reader: Reader, name: str, run: RunInfo, points: int) -> ControlRun:
    totals = reader.step_totals(run.id)
    steps = reader.overview(run.id, points)
    return ControlRun(name, run, steps, totals.steps, totals.skipped, totals.nonfinite_losses)


def _series(c: ControlRun) -> Series:
    colour, dash = _STYLES.get(c.run.spec.control, _FIXED_STYLE)
    parts = finite_parts([s.step for s in c.steps], [s.loss for s in c.steps])
    return Series(c.name, parts, colour, dash, tuple(s.step for s in c.steps if s.skipped))


def _last(steps: list[StepRecord]) -> str:
    losses = [s.loss for s in steps if s.loss is not None and not math.isnan(s.loss)]
    last = next((s.loss for s in reversed(steps) if s.loss is not None), None)
    return number(last) if last is not None or losses else "none"


# What every rule answered, so that a reader sees what was looked for and not found.


_ORDER = (Status.FOUND, Status.INCONCLUSIVE, Status.ERRORED, Status.PASSED, Status.NOT_APPLICABLE)


def rule_blocks(report: DiagnosisResult) -> tuple[Block, ...]:
    """A folded table, what was found first."""
    answers = sorted(report.diagnosis.answers, key=lambda pair: _ORDER.index(pair[1].status))
    rows = tuple(
        (CAUSES[rule.id].title, str(verdict.status).replace("_", " "), verdict.reason)
        for rule, verdict in answers
    )
    table = Table(("Cause", "Answer", "Why"), rows)
    return (Fold(f"All {len(rows)} causes that were looked for", (table,)),)
