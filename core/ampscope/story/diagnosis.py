"""What a report says of a diagnosed script: the Diagnosis page's sections, in its words."""

from __future__ import annotations

from ampscope.analysis.run_view import RunView
from ampscope.analysis.training import finite_parts
from ampscope.causes import CAUSES
from ampscope.control import Control
from ampscope.diagnosis.findings import Finding
from ampscope.diagnosis.load import load_diagnosis
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.number_words import value
from ampscope.records import RunInfo
from ampscope.rules.verdict import Status
from ampscope.store.reader import Reader
from ampscope.story import document as doc
from ampscope.story import fix_words, shared, training
from ampscope.story import verdict_words as words
from ampscope.story.palette import MEASURE, dtype_color
from ampscope.story.shared import base
from ampscope.story.verdict_words import causal_chain


def part(reader: Reader, info: RunInfo, points: int) -> doc.Part:
    """The diagnosis that ``info`` belongs to. Raises BadInput while the baseline run still
    runs."""
    report = load_diagnosis(reader, info.id)
    head = report.runs.get("as_is", info)
    baseline = RunView(head.spec.control, head.id, reader.observations(head.id))
    findings = report.diagnosis.findings
    sections = [doc.Section("Verdict", _verdict(report, baseline))]
    if findings:
        sections.append(doc.Section("From the cause to what you see", _chain(report, baseline)))
        sections.append(doc.Section("The fix", _fix(report)))
    recorded = recorded_controls(reader, report, points)
    sections.append(doc.Section("The controls side by side", control_blocks(report, recorded)))
    if findings:
        sections.append(doc.Section("Evidence", _evidence(report, findings[0])))
    sections += training.scale_sections(reader, head, points)
    found = findings[0].verdict if findings else None
    sections += shared.histogram_sections(
        reader, head, found.module if found else None, found.step if found else None
    )
    if findings[1:]:
        sections.append(doc.Section("Also found", _others(report)))
    for finding in report.diagnosis.latent:
        sections.append(doc.Section(words.heading(finding, "Latent"), _advice(finding)))
    sections.append(doc.Section("What is missing", shared.of_diagnosis(reader, report, head)))
    sections.append(doc.Section("Every rule's answer", rule_blocks(report)))
    sections += shared.origin_sections(list(report.runs.values()) or [head], head)
    return doc.Part(words.verdict(report, baseline), shared.subject(head), tuple(sections))


def _verdict(report: DiagnosisResult, baseline: RunView) -> tuple[doc.Block, ...]:
    headline = words.headline(report)
    blocks: list[doc.Block] = [doc.Paragraph(headline)] if headline else []
    paragraph = words.paragraph(report, baseline)
    blocks.append(doc.Paragraph(paragraph))
    problem = words.could_not_run(report, baseline)
    findings = report.diagnosis.findings
    if findings and not problem and findings[0].verdict.code:
        blocks.append(doc.Code(findings[0].verdict.code, "python"))
    blocks.append(doc.Paragraph(words.next_step(report, baseline).rstrip(":"), "What to do."))
    if findings and not problem:
        blocks.append(doc.Figures(tuple(words.key_figures(report))))
    outcome = baseline.outcome
    head = report.runs.get("as_is")
    trace = head.traceback if head is not None else ""
    if trace or outcome.error_text:
        text = trace or f"{outcome.error_type}: {outcome.error_text}"
        blocks.append(doc.Fold("The script's own error", (doc.Code(text),)))
    if notes := words.other_notes(report, paragraph):
        blocks.append(doc.Paragraph(notes))
    return tuple(blocks)


def _chain(report: DiagnosisResult, baseline: RunView) -> tuple[doc.Block, ...]:
    links = causal_chain(report.diagnosis.findings[0], baseline, report.diagnosis.symptoms)
    rows = tuple(
        (str(n), link.title, link.detail, "" if link.step is None else f"{link.step:,}")
        for n, link in enumerate(links, 1)
    )
    return (doc.Table(("", "What", "Detail", "Step"), rows, numeric=(3,)),)


def _fix(report: DiagnosisResult) -> tuple[doc.Block, ...]:
    finding = report.diagnosis.findings[0]
    cured = fix_words.chosen(report)
    blocks: list[doc.Block] = [doc.Paragraph(fix_words.sentence(finding, cured))]
    patch = fix_words.patch(finding, cured)
    if patch:
        blocks.append(doc.Code(patch, "python"))
    if report.trials:
        blocks.append(doc.Paragraph(fix_words.seen(report)))
        blocks.append(doc.Table(fix_words.TRIAL_COLUMNS, fix_words.trial_rows(report)))
    return tuple(blocks)


def _evidence(report: DiagnosisResult, finding: Finding) -> tuple[doc.Block, ...]:
    if not finding.verdict.evidence:
        return (doc.Paragraph("The verdict rests on the script's own error."),)
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
    return (doc.Table(columns, rows, numeric=(1, 2, 4)),)


def _others(report: DiagnosisResult) -> tuple[doc.Block, ...]:
    blocks: list[doc.Block] = []
    for finding in report.diagnosis.findings[1:]:
        blocks += _advice(finding, f"{CAUSES[finding.cause].titled}.")
    return tuple(blocks)


def _advice(finding: Finding, title: str = "") -> tuple[doc.Block, ...]:
    """The reason, what to do, and the patch."""
    fix = finding.verdict.fix
    blocks: list[doc.Block] = [doc.Paragraph(finding.verdict.reason, title)]
    if fix.text:
        blocks.append(doc.Paragraph(fix.text, "What to do."))
    if fix.patch:
        blocks.append(doc.Code(fix.patch, "python"))
    return tuple(blocks)


# Losses of the baseline run, in fp32, in bf16 and with the fix, over one axis of steps.


# The baseline has no dtype's colour: it may be fp16 in one part only.
_STYLES = {
    "as_is": (dtype_color("fp16"), ""),
    "fp32": (dtype_color("fp32"), "9 6"),
    "bf16": (dtype_color("bf16"), "2 4"),
}
_FIXED_STYLE = (MEASURE, "9 4 2 4")


def recorded_controls(
    reader: Reader, report: DiagnosisResult, points: int
) -> list[fix_words.ControlRun]:
    """The three controls, and the fix that worked (else the last that was tried)."""
    found = [(name, report.runs.get(word)) for name, word in fix_words.compared(report)]
    return [
        fix_words.ControlRun(name, run, reader.overview(run.id, points), reader.step_totals(run.id))
        for name, run in found
        if run is not None and not run.state.is_active
    ]


def control_blocks(
    report: DiagnosisResult, found: list[fix_words.ControlRun]
) -> tuple[doc.Block, ...]:
    """The chart and a row for each."""
    drawn = [c for c in found if c.steps]
    rows = tuple(fix_words.control_row(report, control) for control in found)
    table = doc.Table(fix_words.CONTROL_COLUMNS, rows)
    if not drawn:
        return (doc.Paragraph("No run made an optimizer step, so there is no loss to draw."), table)
    series = tuple(_series(c) for c in drawn)
    values = [v for s in series for v in s.points.values]
    return (doc.Lines("Loss by control", "loss", series, base=base(values)), table)


def _series(c: fix_words.ControlRun) -> doc.Series:
    colour, dash = _STYLES.get(c.run.spec.control, _FIXED_STYLE)
    parts = finite_parts([s.step for s in c.steps], [s.loss for s in c.steps])
    return doc.Series(c.name, parts, colour, dash, tuple(s.step for s in c.steps if s.skipped))


# What every rule answered, so that a reader sees what was looked for and not found.


_ORDER = (
    Status.FOUND,
    Status.LATENT,
    Status.INCONCLUSIVE,
    Status.ERRORED,
    Status.PASSED,
    Status.NOT_APPLICABLE,
)


def rule_blocks(report: DiagnosisResult) -> tuple[doc.Block, ...]:
    """A folded table, what was found first."""
    answers = sorted(report.diagnosis.answers, key=lambda pair: _ORDER.index(pair[1].status))
    rows = tuple(
        (CAUSES[rule.id].titled, str(verdict.status).replace("_", " "), verdict.reason)
        for rule, verdict in answers
    )
    table = doc.Table(("Cause", "Answer", "Why"), rows)
    return (doc.Fold(f"All {len(rows)} causes that were looked for", (table,)),)
