"""A diagnosis for the terminal: verdict, a paragraph, evidence, patch, what was tried."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ampscope.causes import CAUSES
from ampscope.diagnose import Finding
from ampscope.experiments.report import Report
from ampscope.report import fix_words
from ampscope.rules.verdict import Measurement

POLICIES = {
    "native": "this CPU's own autocast lists and kernels",
    "rehearsal": "CUDA's autocast lists and Tensor Core arithmetic, rehearsed on this CPU",
    "cuda": "CUDA",
}


def print_report(report: Report, console: Console) -> None:
    """Everything a person needs, root cause first."""
    if report.could_not_run:
        console.print(Text(f"Could not diagnose: {report.could_not_run}", style="bold"))
        return
    diagnosis = report.diagnosis
    if not diagnosis.findings:
        console.print(_no_finding(report))
    for number, finding in enumerate(diagnosis.findings):
        console.print(_finding(finding, report, first=number == 0))
    controls = ", ".join(
        f"{name}: {'; '.join(s) if s else 'healthy'}" for name, s in report.control_symptoms.items()
    )
    console.print(Text(f"Controls: {controls}"))
    policy = POLICIES.get(diagnosis.policy, diagnosis.policy)
    console.print(
        Text(
            f"Judged under {policy}, in {report.elapsed_s:.0f} s and {len(report.runs)} runs. "
            + " ".join(report.notes)
        )
    )


def _no_finding(report: Report) -> RenderableType:
    if report.diagnosis.verdict == "no_fault":
        text = "No fault found. The script trains as its fp32 control does."
    else:
        text = report.undecided
    return Panel(Text(text), title="Verdict", title_align="left")


def _finding(finding: Finding, report: Report, *, first: bool) -> RenderableType:
    verdict = finding.verdict
    cause = CAUSES[finding.cause]
    where = [part for part in (verdict.module, verdict.op, verdict.phase, verdict.line) if part]
    parts: list[RenderableType] = [Text(verdict.reason)]
    if where:
        step = f", step {verdict.step}" if verdict.step is not None else ""
        parts.append(Text("Where: " + ", ".join(where) + step))
    if verdict.code:
        parts.append(Text(f"    {verdict.code}"))
    if verdict.evidence:
        parts.append(_evidence(verdict.evidence))
    cured = fix_words.best(report) if first else None
    parts.append(Text(f"Fix: {fix_words.sentence(finding, cured)}"))
    patch = fix_words.patch(finding, cured)
    if patch:
        parts.append(Syntax(patch.rstrip(), "python", background_color="default"))
    if first and report.trials:
        tried = "; ".join(
            f"{t.control}: {'cured' if t.cured else 'not cured'}" for t in report.trials
        )
        price = f" at {cured.price:.2f} times the time a step" if cured and cured.price else ""
        if cured and cured.memory:
            price += f" and {cured.memory:.2f} times the peak memory"
        word = (
            f"Verified by a run with {cured.control}{price}" if cured else "No fix was seen to work"
        )
        parts.append(Text(f"{word}. Tried: {tried}."))
    if finding.consequences:
        names = ", ".join(CAUSES[c.cause].title.lower() for c in finding.consequences)
        parts.append(Text(f"Consequences: {names}."))
    title = f"{'Root cause' if first else 'Also found'}: {escape(cause.title)} ({cause.name})"
    return Panel(Group(*parts), title=title, title_align="left")


def _evidence(measurements: tuple[Measurement, ...]) -> Table:
    table = Table(show_edge=False)
    table.add_column("evidence")
    for name in ("value", "limit", "step"):
        table.add_column(name, justify="right")
    table.add_column("run")
    for m in measurements:
        table.add_row(
            escape(m.name), _text(m.value), _text(m.threshold), _text(m.step), escape(m.run)
        )
    return table


def _text(value: float | str | None) -> str:
    if value is None:
        return ""
    return escape(value) if isinstance(value, str) else f"{value:,.6g}"
