"""A diagnosis for the terminal: verdict, a paragraph, evidence, patch, what was tried.

Much of it is a script's own words; in an imported run it comes from an untrusted file. Each text
is spelled out by :mod:`.document`, so that none moves the cursor, names the window or clears the
screen.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ampscope.causes import CAUSES
from ampscope.control import Control
from ampscope.diagnosis.findings import Finding
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.number_words import value
from ampscope.rules.verdict import Measurement
from ampscope.story import fix_words, verdict_words
from ampscope.story.document import CODE_LENGTH, line, visible
from ampscope.story.run_words import rules_in_full
from ampscope.story.verdict_words import no_fault


def print_report(report: DiagnosisResult, console: Console) -> None:
    """Everything a person needs, root cause first."""
    diagnosis = report.diagnosis
    head = report.runs.get("as_is")
    rules = rules_in_full(head) if head is not None else diagnosis.policy
    if report.could_not_run:
        console.print(_said(f"Could not diagnose: {report.could_not_run}", style="bold"))
        if diagnosis.policy == "rehearsal":
            console.print(_said(f"It ran under {rules}."))
        return
    if report.precision is not None and (
        said := verdict_words.precision_headline(report.precision)
    ):
        console.print(_said(said, style="bold"))
    if not diagnosis.findings:
        console.print(_no_finding(report))
    for number, finding in enumerate(diagnosis.findings):
        console.print(_finding(finding, report, first=number == 0))
    for finding in diagnosis.latent:
        console.print(_latent(finding))
    for sentence in fix_words.run_lines(report):
        console.print(_said(sentence))
    console.print(
        _said(
            f"Judged under {rules}, in {report.elapsed_s:.0f} s and {len(report.runs)} runs. "
            + " ".join(report.notes)
        )
    )


def print_cause(report: DiagnosisResult, console: Console) -> None:
    """The root cause in one paragraph, before its fixes are run."""
    finding = report.diagnosis.findings[0]
    at = finding.verdict.line or finding.verdict.module
    title = verdict_words.heading(finding, "Root cause so far")
    text = f"{title}{f', at {at}' if at else ''}. {finding.verdict.reason}"
    console.print(_said(text), soft_wrap=True)


def _no_finding(report: DiagnosisResult) -> RenderableType:
    if report.diagnosis.verdict == "no_fault":
        text = no_fault(report)
    else:
        text = report.undecided + verdict_words.missing(report)
        if report.lead is not None and report.lead.code:
            text += f"\n    {report.lead.code}"
        text += f"\nWhat to do: {verdict_words.when_undetermined(report)}"
    return Panel(_said(text), title="Verdict", title_align="left")


def _finding(finding: Finding, report: DiagnosisResult, *, first: bool) -> RenderableType:
    verdict = finding.verdict
    phase = "the optimizer's step" if verdict.phase == "step" else verdict.phase
    rank = "" if report.rank is None else f"rank {report.rank}"
    where = [part for part in (rank, verdict.module, verdict.op, phase, verdict.line) if part]
    parts: list[RenderableType] = [_said(verdict.reason)]
    if where:
        step = f", at step {verdict.step}" if verdict.step is not None else ""
        parts.append(_said("Where: " + ", ".join(where) + step))
    if verdict.code:
        parts.append(_said(f"    {verdict.code}"))
    if verdict.evidence:
        parts.append(_evidence(verdict.evidence))
    cured = fix_words.chosen(report) if first else None
    parts.append(_said(f"Fix: {fix_words.sentence(finding, cured)}"))
    patch = fix_words.patch(finding, cured)
    if patch:
        shown = visible(patch.rstrip(), CODE_LENGTH)
        parts.append(Syntax(shown, "python", background_color="default"))
    if first and (made := fix_words.each_run(report)):
        seen = f"{fix_words.seen(report)} " if report.trials else ""
        parts.append(_said(f"{seen}Each run: {made}."))
    if finding.consequences:
        causes = (CAUSES[c.cause] for c in finding.consequences)
        names = ", ".join(cause.inside for cause in causes)
        parts.append(_said(f"Consequences: {names}."))
    title = escape(verdict_words.heading(finding, "Root cause" if first else "Also found"))
    return Panel(Group(*parts), title=title, title_align="left")


def _latent(finding: Finding) -> RenderableType:
    verdict = finding.verdict
    advice = _said(f"Fix: {verdict.fix.text}")
    parts: list[RenderableType] = [_said(verdict.reason), _evidence(verdict.evidence), advice]
    title = escape(verdict_words.heading(finding, "Latent"))
    return Panel(Group(*parts), title=title, title_align="left")


def _evidence(measurements: tuple[Measurement, ...]) -> Table:
    table = Table(show_edge=False)
    table.add_column("evidence")
    for name in ("value", "limit", "step"):
        table.add_column(name, justify="right")
    table.add_column("run")
    for m in measurements:
        limit = "" if m.threshold is None else value(m.threshold)
        step = "" if m.step is None else f"{m.step:,}"
        cells = (m.name, value(m.value), limit, step, Control(m.run or "as_is").words)
        table.add_row(*(escape(line(cell)) for cell in cells))
    return table


def _said(text: str, style: str = "") -> Text:
    return Text(visible(text), style=style)
