"""What a report does not show, and why: "not recorded" is not "did not happen"."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.experiments.report import Report
from ampscope.records import Role, RunInfo, State
from ampscope.report.contents.origin import POLICIES
from ampscope.report.document import Block, Paragraph, Table
from ampscope.report.words.numbers import plural
from ampscope.rules.verdict import Status
from ampscope.store.reader import Reader


def of_diagnosis(reader: Reader, report: Report, head: RunInfo) -> tuple[Block, ...]:
    """Of a script and its controls."""
    found = [*_of_controls(report), *_of_run(reader, head)]
    rules = [r for r, v in report.diagnosis.answers if v.status is Status.INCONCLUSIVE]
    if rules:
        found.append(
            (
                f"{plural(len(rules), 'rule')} could not tell",
                "The table of every rule says why.",
            )
        )
    return _table(found)


def of_run(reader: Reader, run: RunInfo) -> tuple[Block, ...]:
    """Of one recorded training."""
    return _table(list(_of_run(reader, run)))


def _table(found: list[tuple[str, str]]) -> tuple[Block, ...]:
    if not found:
        return (Paragraph("Nothing that this kind of run records is missing."),)
    return (Table(("Missing", "Why"), tuple(found)),)


def _of_controls(report: Report) -> Iterator[tuple[str, str]]:
    for name in ("fp32", "bf16"):
        run = report.runs.get(name)
        if run is None:
            why = (
                "It is run only where something is wrong."
                if name == "bf16"
                else "It was not run, or was deleted: how the script learns in fp32 is not known."
            )
            yield f"The control in {name}", why
        elif run.state is not State.FINISHED:
            yield f"The control in {name}, in part", f"It {run.state}. {run.message}"
    findings = report.diagnosis.findings
    if findings and not report.trials:
        controls = findings[0].verdict.fix.controls
        why = (
            "No run with it was made."
            if controls
            else "ampscope cannot apply it to a running script."
        )
        yield "A proof of the fix", why


def _of_run(reader: Reader, run: RunInfo) -> Iterator[tuple[str, str]]:
    if run.state is not State.FINISHED:
        yield "The rest of the run", f"It is {run.state}. {run.message}".strip()
    if run.spec.world > 1:
        yield "The other ranks", f"This is rank {run.spec.rank} of {run.spec.world}; name them too."
    machine = run.machine
    if machine is not None and machine.policy != "cuda":
        rules = POLICIES.get(machine.policy, machine.policy)
        yield "A GPU", f"It ran under {rules}; times say nothing about a GPU."
    roles = [role for role in Role if reader.frame_spans(run.id, role)]
    if not roles:
        yield "Exponent histograms", _why_no_histograms(run)
    if run.spec.kind == "probe" and not reader.shadows(run.id):
        yield "The fp32 shadow", "None was taken: what was lost cannot be told from what was zero."
    if not reader.samples(run.id, 2):
        yield "Telemetry", "Load, memory and clocks of the machine were not read beside this run."


def _why_no_histograms(run: RunInfo) -> str:
    if run.spec.kind == "script":
        return "They are taken of scripts whose modules run in half precision, as far as they go."
    if run.spec.kind == "watch":
        return "Watch it with every=10 or another number of steps: every=0 takes none."
    return "The probe was started without them (--histogram-every 0), or it made no step."
