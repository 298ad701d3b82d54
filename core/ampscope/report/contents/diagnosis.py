"""What a report says of a diagnosed script: the Diagnosis page's sections, in its words."""

from __future__ import annotations

from ampscope.analysis.run_view import RunView
from ampscope.causes import CAUSES
from ampscope.diagnose import Finding
from ampscope.records import RunInfo
from ampscope.report import fix_words
from ampscope.report.contents import controls, gaps, histograms, origin, rules, scale
from ampscope.report.document import (
    Block,
    Code,
    Figure,
    Figures,
    Fold,
    Paragraph,
    Part,
    Section,
    Table,
)
from ampscope.report.words import verdict as words
from ampscope.report.words.chain import chain
from ampscope.report.words.controls import control, value
from ampscope.store.reader import Reader
from ampscope.verdicts.recall import recall
from ampscope.verdicts.report import Report


def part(reader: Reader, info: RunInfo, points: int) -> Part:
    """The diagnosis that ``info`` belongs to. Raises BadInput while the script as it is still
    runs."""
    report = recall(reader, info.id)
    head = report.runs.get("as_is", info)
    as_is = RunView(head.spec.control, head.id, reader.observations(head.id))
    findings = report.diagnosis.findings
    sections = [Section("Verdict", _verdict(report, as_is))]
    if findings:
        sections.append(Section("From the cause to what you see", _chain(report, as_is)))
        sections.append(Section("The fix", _fix(report)))
    recorded = controls.recorded(reader, report, points)
    sections.append(Section("The controls side by side", controls.blocks(report, recorded)))
    if findings:
        sections.append(Section("Evidence", _evidence(report, findings[0])))
    sections += scale.sections(reader, head, points)
    found = findings[0].verdict if findings else None
    sections += histograms.sections(
        reader, head, found.module if found else None, found.step if found else None
    )
    if findings[1:]:
        sections.append(Section("Also found", _others(report)))
    sections.append(Section("What is missing", gaps.of_diagnosis(reader, report, head)))
    sections.append(Section("Every rule's answer", rules.blocks(report)))
    sections += origin.sections(list(report.runs.values()) or [head], head)
    return Part(words.verdict(report, as_is), origin.subject(head), tuple(sections))


def _verdict(report: Report, as_is: RunView) -> tuple[Block, ...]:
    headline = words.headline(report)
    blocks: list[Block] = [Paragraph(headline)] if headline else []
    blocks.append(Paragraph(words.paragraph(report, as_is)))
    problem = words.could_not_run(report, as_is)
    findings = report.diagnosis.findings
    if findings and not problem and findings[0].verdict.code:
        blocks.append(Code(findings[0].verdict.code, "python"))
    blocks.append(Paragraph(words.next_step(report, as_is).rstrip(":"), "What to do."))
    if findings and not problem:
        blocks.append(_figures(report, findings[0]))
    outcome = as_is.outcome
    head = report.runs.get("as_is")
    trace = head.traceback if head is not None else ""
    if trace or outcome.error_text:
        text = trace or f"{outcome.error_type}: {outcome.error_text}"
        blocks.append(Fold("The script's own error", (Code(text),)))
    if report.notes:
        blocks.append(Paragraph(" ".join(report.notes)))
    return tuple(blocks)


def _figures(report: Report, finding: Finding) -> Figures:
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


def _chain(report: Report, as_is: RunView) -> tuple[Block, ...]:
    links = chain(report.diagnosis.findings[0], as_is, report.diagnosis.symptoms)
    rows = tuple(
        (str(n), link.title, link.detail, "" if link.step is None else f"{link.step:,}")
        for n, link in enumerate(links, 1)
    )
    return (Table(("", "What", "Detail", "Step"), rows, numeric=(3,)),)


def _fix(report: Report) -> tuple[Block, ...]:
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
                control(t.control),
                fix_words.outcome(t),
                f"{t.price:.2f} times" if t.price else "not known",
                f"{t.memory:.2f} times" if t.memory else "not known",
            )
            for t in report.trials
        )
        blocks.append(Table(("The script was run", "Seen", "Time per step", "Peak memory"), rows))
    return tuple(blocks)


def _evidence(report: Report, finding: Finding) -> tuple[Block, ...]:
    if not finding.verdict.evidence:
        return (Paragraph("The verdict rests on the script's own error."),)
    rows = tuple(
        (
            m.name,
            value(m.value),
            "" if m.threshold is None else value(m.threshold),
            control(m.run or "as_is"),
            "" if m.step is None else f"{m.step:,}",
            report.runs[m.run or "as_is"].id if (m.run or "as_is") in report.runs else "",
        )
        for m in finding.verdict.evidence
    )
    columns = ("Measured", "Value", "Limit", "Run", "Step", "Id")
    return (Table(columns, rows, numeric=(1, 2, 4)),)


def _others(report: Report) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for finding in report.diagnosis.findings[1:]:
        blocks.append(Paragraph(finding.verdict.reason, f"{CAUSES[finding.cause].title}."))
        if finding.verdict.fix.text:
            blocks.append(Paragraph(finding.verdict.fix.text, "What to do."))
        if finding.verdict.fix.patch:
            blocks.append(Code(finding.verdict.fix.patch, "python"))
    return tuple(blocks)
