"""A diagnosis, told once: the sections of the Diagnosis page and of a report, as blocks.

:func:`part` is the whole of it, :func:`summary` what a terminal says of it. The page draws the same
sections by the functions below, and puts its forms and buttons between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ampscope.analysis.run_view import RunView
from ampscope.analysis.training import finite_parts
from ampscope.causes import CAUSES
from ampscope.control import BASELINE, COMPILED
from ampscope.diagnosis.findings import Finding
from ampscope.diagnosis.load import load_diagnosis
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.number_words import number
from ampscope.records import RunInfo
from ampscope.rules.verdict import Status
from ampscope.store.reader import Reader
from ampscope.story import document as doc
from ampscope.story import fix_words, shared, training
from ampscope.story import verdict_words as words
from ampscope.story.palette import MEASURE, OTHER_DTYPE, dtype_color
from ampscope.story.run_words import rules_in_full, script_command
from ampscope.story.shared import base
from ampscope.story.verdict_words import causal_chain


def part(reader: Reader, info: RunInfo, points: int) -> doc.Part:
    """The diagnosis that ``info`` belongs to. Raises BadInput while the baseline run still
    runs."""
    report = load_diagnosis(reader, info.id)
    head = report.runs.get(BASELINE, info)
    baseline = RunView(head.spec.control, head.id, reader.observations(head.id))
    findings = report.diagnosis.findings
    failure = error(report.runs.get(BASELINE), baseline)
    sections = [doc.Section("Verdict", (*verdict(report, baseline), *failure))]
    if findings:
        sections.append(doc.Section("From the cause to what you see", chain(report, baseline)))
        sections.append(doc.Section("The fix", (*fix(report), *_proof(report))))
    recorded = recorded_controls(reader, report, points)
    sections.append(doc.Section("The controls side by side", controls(report, recorded)))
    if findings:
        sections.append(doc.Section("Evidence", evidence(report)))
    sections += training.scale_sections(reader, head, points)
    found = findings[0].verdict if findings else None
    sections += shared.histogram_sections(
        reader, head, found.module if found else None, found.step if found else None
    )
    if findings[1:]:
        sections.append(doc.Section("Also found", _others(report)))
    for finding in report.diagnosis.latent:
        sections.append(doc.Section(words.heading(finding, "Latent"), advice(finding)))
    sections.append(doc.Section("What is missing", shared.of_diagnosis(reader, report, head)))
    sections.append(doc.Section("Every rule's answer", rule_blocks(report)))
    sections += shared.origin_sections(list(report.runs.values()) or [head], head)
    return doc.Part(words.verdict(report, baseline), shared.subject(head), tuple(sections))


def summary(report: DiagnosisResult) -> Iterator[doc.Section]:
    """What fits on a screen of text, root cause first: of each finding the reason, the place, the
    evidence and the fix."""
    head = report.runs.get(BASELINE)
    rules = rules_in_full(head) if head is not None else report.diagnosis.policy
    if report.could_not_run:
        failed = [doc.Paragraph(report.could_not_run, "Could not diagnose:")]
        if report.diagnosis.policy == "rehearsal":
            failed.append(doc.Paragraph(f"It ran under {rules}."))
        yield doc.Section("", tuple(failed))
        return
    if headline := words.headline(report):
        yield doc.Section("", (doc.Paragraph("", headline),))
    if not report.diagnosis.findings:
        yield doc.Section("Verdict", tuple(_no_finding(report)))
    for place, finding in enumerate(report.diagnosis.findings):
        title = words.heading(finding, "Also found" if place else "Root cause")
        yield doc.Section(title, tuple(_finding(finding, report, is_first=place == 0)))
    for finding in report.diagnosis.latent:
        reason, fix_text = doc.Paragraph(finding.verdict.reason), finding.verdict.fix.text
        blocks = (reason, _measured(finding, {}), doc.Paragraph(fix_text, "Fix:"))
        yield doc.Section(words.heading(finding, "Latent"), blocks)
    judged = (
        f"Judged under {rules}, in {report.elapsed_s:.0f} s and {len(report.runs)} runs. "
        + " ".join(report.notes)
    )
    yield doc.Section("", tuple(map(doc.Paragraph, (*fix_words.run_lines(report), judged))))


def cause_so_far(report: DiagnosisResult) -> doc.Paragraph:
    """The root cause in one paragraph, before its fixes are run."""
    finding = report.diagnosis.findings[0]
    at = finding.verdict.line or finding.verdict.module
    title = words.heading(finding, "Root cause so far")
    return doc.Paragraph(f"{title}{f', at {at}' if at else ''}. {finding.verdict.reason}")


def _no_finding(report: DiagnosisResult) -> Iterator[doc.Block]:
    if report.diagnosis.verdict == "no_fault":
        yield doc.Paragraph(words.no_fault(report))
        return
    yield doc.Paragraph(report.undecided + words.missing(report))
    if report.lead is not None and report.lead.code:
        yield doc.Code(report.lead.code, "python")
    command = _command_again(report) if report.precision is not None else ""
    yield from _what_to_do(words.when_undetermined(report), "What to do:", command)


def _command_again(report: DiagnosisResult) -> str:
    """What diagnoses the script longer; "" of an imported run, of which no file is here."""
    head = report.runs.get(BASELINE)
    return script_command(head, words.longer(report)) if head and not head.spec.imported else ""


def _what_to_do(text: str, lead: str, command: str) -> Iterator[doc.Block]:
    """Advice, and behind its colon, where it ends in one, the command; without a command there is
    no colon."""
    is_run = bool(command) and text.endswith(":")
    yield doc.Paragraph(text if is_run else text.removesuffix(":").rstrip(".") + ".", lead)
    if is_run:
        yield doc.Code(command, "bash")


def _finding(finding: Finding, report: DiagnosisResult, *, is_first: bool) -> Iterator[doc.Block]:
    v, cured = finding.verdict, fix_words.chosen(report) if is_first else None
    yield doc.Paragraph(v.reason)
    rank = "" if report.rank is None else f"rank {report.rank}"
    phase = "the optimizer's step" if v.phase == "step" else v.phase
    if where := [part for part in (rank, v.module, v.op, phase, v.line) if part]:
        step = [] if v.step is None else [f"at step {v.step}"]
        yield doc.Paragraph(", ".join(where + step), "Where:")
    if v.code:
        yield doc.Code(v.code, "python")
    if v.evidence:
        yield _measured(finding, {})
    yield doc.Paragraph(fix_words.sentence(finding, cured), "Fix:")
    if patch := fix_words.patch(finding, cured):
        yield doc.Code(patch, "python")
    if is_first and (made := fix_words.each_run(report)):
        seen = f"{fix_words.seen(report)} " if report.trials else ""
        yield doc.Paragraph(f"{seen}Each run: {made}.")
    if finding.consequences:
        names = ", ".join(CAUSES[c.cause].inside for c in finding.consequences)
        yield doc.Paragraph(f"{names}.", "Consequences:")


def verdict(report: DiagnosisResult, baseline: RunView, command: str = "") -> tuple[doc.Block, ...]:
    """What follows the verdict's own sentence: why, what to do, the key figures. ``command``
    diagnoses the script again, where one can be named."""
    headline, paragraph = words.headline(report), words.paragraph(report, baseline)
    findings = () if words.could_not_run(report, baseline) else report.diagnosis.findings
    blocks: list[doc.Block] = [doc.Paragraph(headline)] if headline and not findings else []
    blocks.append(doc.Paragraph(paragraph))
    if findings and findings[0].verdict.code:
        blocks.append(doc.Code(findings[0].verdict.code, "python"))
    next_step = words.next_step(report, baseline)
    blocks += _what_to_do(next_step, "What to do.", "" if findings else command)
    if findings:
        blocks.append(doc.Figures(tuple(words.key_figures(report))))
        if headline:
            blocks.append(doc.Paragraph(headline, is_quiet=True))
    if notes := words.other_notes(report, paragraph):
        blocks.append(doc.Paragraph(notes, is_quiet=True))
    return tuple(blocks)


def error(head: RunInfo | None, baseline: RunView) -> tuple[doc.Block, ...]:
    """The script's own exception, whole; of a run that hung, where it stood."""
    outcome, trace = baseline.outcome, head.traceback if head is not None else ""
    if not trace and not outcome.error_text:
        return ()
    text = trace or f"{outcome.error_type}: {outcome.error_text}"
    title = "The script's own error" if outcome.error_text else "Where it stood"
    return (doc.Fold(title, (doc.Code(text),)),)


def chain(report: DiagnosisResult, baseline: RunView) -> tuple[doc.Block, ...]:
    """From the first finding's cause to what a person sees."""
    links = causal_chain(report.diagnosis.findings[0], baseline, report.diagnosis.symptoms)
    return (doc.Chain(tuple(links)),)


def fix(report: DiagnosisResult) -> tuple[doc.Block, ...]:
    """What to change, as a sentence and as a patch."""
    finding, cured = report.diagnosis.findings[0], fix_words.chosen(report)
    patch = fix_words.patch(finding, cured)
    advised = doc.Paragraph(fix_words.sentence(finding, cured))
    return (advised, doc.Code(patch, "python")) if patch else (advised,)


def _proof(report: DiagnosisResult) -> tuple[doc.Block, ...]:
    return (doc.Paragraph(fix_words.seen(report)), tried(report)) if report.trials else ()


def tried(report: DiagnosisResult) -> doc.Table:
    """Every run beside the baseline and its controls, and what it showed."""
    return doc.Table(fix_words.TRIAL_COLUMNS, fix_words.trial_rows(report))


def evidence(report: DiagnosisResult) -> tuple[doc.Block, ...]:
    """The measurements behind the first finding."""
    finding = report.diagnosis.findings[0]
    if not finding.verdict.evidence:
        return (doc.Paragraph("The verdict rests on the script's own error."),)
    return (_measured(finding, {control: run.id for control, run in report.runs.items()}),)


def _measured(finding: Finding, runs: Mapping[str, str]) -> doc.EvidenceBlock:
    measured = (
        doc.Measured(m.name, m.value, m.threshold, control, m.step, runs.get(control, ""))
        for m in finding.verdict.evidence
        for control in [m.run or BASELINE]
    )
    return doc.EvidenceBlock(tuple(measured))


def _others(report: DiagnosisResult) -> tuple[doc.Block, ...]:
    blocks: list[doc.Block] = []
    for finding in report.diagnosis.findings[1:]:
        blocks += advice(finding, f"{CAUSES[finding.cause].titled}.")
    return tuple(blocks)


def advice(finding: Finding, title: str = "") -> tuple[doc.Block, ...]:
    """The reason, what to do, and the patch."""
    fix = finding.verdict.fix
    blocks: list[doc.Block] = [doc.Paragraph(finding.verdict.reason, title)]
    if fix.text:
        blocks.append(doc.Paragraph(fix.text, "What to do."))
    if fix.patch:
        blocks.append(doc.Code(fix.patch, "python"))
    return tuple(blocks)


# The baseline has no dtype's colour: it may be fp16 in one part only.
_STYLES = {
    BASELINE: (dtype_color("fp16"), ""),
    "fp32": (dtype_color("fp32"), "9 6"),
    "bf16": (dtype_color("bf16"), "2 4"),
    COMPILED: (OTHER_DTYPE, "14 5"),
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


def controls(
    report: DiagnosisResult, found: Sequence[fix_words.ControlRun]
) -> tuple[doc.Block, ...]:
    """The last losses in a sentence, the chart of all, and a row for each."""
    rows = tuple(fix_words.control_row(report, control) for control in found)
    table = doc.Table(fix_words.CONTROL_COLUMNS, rows)
    chart = control_losses(found)
    if chart is None:
        return (doc.Paragraph("No run made an optimizer step, so there is no loss to draw."), table)
    return (doc.Paragraph(last_losses(found)), chart, table)


def control_losses(found: Sequence[fix_words.ControlRun]) -> doc.Lines | None:
    """The loss of each run over one axis of steps; None while no step was made."""
    series = []
    for c in found:
        if not c.steps:
            continue
        colour, dash = _STYLES.get(c.run.spec.control, _FIXED_STYLE)
        parts = finite_parts([s.step for s in c.steps], [s.loss for s in c.steps])
        skipped = tuple(s.step for s in c.steps if s.skipped)
        unknown = tuple(s.step for s in c.steps if s.loss is None)
        series.append(
            doc.Series(c.name, parts, colour, dash, skipped, run_id=c.run.id, not_recorded=unknown)
        )
    values = [v for s in series for v in s.points.values]
    return (
        doc.Lines("Loss by control", "loss", tuple(series), base=base(values)) if series else None
    )


def last_losses(found: Sequence[fix_words.ControlRun]) -> str:
    """The last loss of each run, and which curves lie under another."""
    lasts = [(c.name, c.last_loss) for c in found]
    said = "; ".join(f"{name} {'no step' if x is None else number(x)}" for name, x in lasts)
    curves: dict[tuple[str, ...], list[str]] = {}
    for control in found:
        curves.setdefault(tuple(str(s.loss) for s in control.steps), []).append(control.name)
    equal = [" and ".join(names) for losses, names in curves.items() if losses and names[1:]]
    return f"Last loss: {said}." + (f" The same curve: {'; '.join(equal)}." if equal else "")


# What a rule can answer, in the order that is shown, and what those that answered so are called.
ANSWERS = {
    Status.FOUND: "found",
    Status.LATENT: "latent",
    Status.INCONCLUSIVE: "inconclusive",
    Status.ERRORED: "failed themselves",
    Status.PASSED: "passed",
    Status.NOT_APPLICABLE: "not applicable",
}


def rule_blocks(report: DiagnosisResult) -> tuple[doc.Block, ...]:
    """A folded table, what was found first, so that a reader sees what was looked for and not
    found."""
    order = list(ANSWERS)
    answers = sorted(report.diagnosis.answers, key=lambda pair: order.index(pair[1].status))
    rows = tuple(
        (CAUSES[rule.id].titled, str(verdict.status).replace("_", " "), verdict.reason)
        for rule, verdict in answers
    )
    table = doc.Table(("Cause", "Answer", "Why"), rows)
    return (doc.Fold(f"All {len(rows)} causes that were looked for", (table,)),)
