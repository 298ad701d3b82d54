"""What a report does not show, and why: "not recorded" is not "did not happen"."""

from __future__ import annotations

from collections.abc import Iterator

from ampscope.policy import gaps
from ampscope.records import OpRecord, Role, RunInfo, State
from ampscope.report.document import Block, Paragraph, Table
from ampscope.report.words.numbers import plural
from ampscope.report.words.run import rules, why_no_histograms
from ampscope.rules.verdict import Status
from ampscope.store.reader import Reader
from ampscope.store.series import last_shadow_step
from ampscope.verdicts.report import Report

FEW_STEPS = 20
NOTHING = "Nothing that this kind of run records is missing."


def of_diagnosis(reader: Reader, report: Report, head: RunInfo) -> tuple[Block, ...]:
    """Of a script and its controls."""
    found = [*_of_controls(report), *_of_run(reader, head)]
    unsure = [r for r, v in report.diagnosis.answers if v.status is Status.INCONCLUSIVE]
    if unsure:
        found.append(
            (
                f"{plural(len(unsure), 'rule')} could not tell",
                "The table of every rule says why.",
            )
        )
    return listed(found)


def of_run(reader: Reader, run: RunInfo) -> tuple[Block, ...]:
    """Of one recorded training."""
    return listed(list(_of_run(reader, run)))


def listed(found: list[tuple[str, str]], otherwise: str = NOTHING) -> tuple[Block, ...]:
    """As a table of what and why."""
    if not found:
        return (Paragraph(otherwise),)
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


def _ops(reader: Reader, run: RunInfo) -> list[OpRecord]:
    """Of the run's first traced steps; later ones repeat them."""
    sets = {step.op_set for step in reader.steps(run.id)[:FEW_STEPS] if step.op_set is not None}
    return [op for number in sets for op in reader.ops(run.id, number)]


def _of_run(reader: Reader, run: RunInfo) -> Iterator[tuple[str, str]]:
    if run.state is not State.FINISHED:
        yield "The rest of the run", f"It is {run.state}. {run.message}".strip()
    if run.spec.world > 1:
        yield "The other ranks", f"This is rank {run.spec.rank} of {run.spec.world}; name them too."
    machine = run.machine
    if machine is not None and machine.policy != "cuda":
        yield "A GPU", f"It ran under {rules(machine)}; times say nothing about a GPU."
    if machine is not None and run.spec.kind == "probe":
        ran = ((op.op, dtype) for op in _ops(reader, run) for dtype in op.inputs.split(","))
        for gap in gaps.met_by(ran, machine.policy):
            yield "CUDA's own arithmetic", gap.text
    roles = [role for role in Role if reader.frame_spans(run.id, role)]
    if not roles:
        yield "Exponent histograms", why_no_histograms(run)
    if run.spec.kind == "probe" and last_shadow_step(reader, run.id) is None:
        yield "The fp32 shadow", "None was taken: what was lost cannot be told from what was zero."
    if not reader.samples(run.id, 2):
        yield "Telemetry", "Load, memory and clocks of the machine were not read beside this run."
