"""What several parts of a report say alike: where the figures come from (machine, versions, runs,
how to look again), how curves look, what is not shown and why, and exponent histograms.

The host's name and the folders of files are left out: a report is made to be handed on. (A
traceback is shown as it is, with the paths in it.)
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from ampscope import __version__
from ampscope.analysis.distribution import (
    LOST,
    NONFINITE,
    OVERFLOW,
    SUBNORMAL,
    merged,
    trouble,
    zone_counts,
)
from ampscope.control import BASELINE, Control
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.number_words import duration, percent, plural, power_of_two
from ampscope.numerics.formats import FORMATS, NumberFormat
from ampscope.policy import op_lists
from ampscope.records import Frame, OpRecord, Role, RunInfo, State
from ampscope.rules.verdict import Status
from ampscope.store.reader import Reader
from ampscope.store.series import last_shadow_step
from ampscope.story import document as doc
from ampscope.story.palette import DTYPES, MEASURE, dtype_color
from ampscope.story.run_words import file_name, rules, why_no_histograms

_READ = (
    doc.Link("PyTorch: automatic mixed precision", "https://docs.pytorch.org/docs/stable/amp.html"),
    doc.Link(
        "PyTorch: examples of autocast and GradScaler",
        "https://docs.pytorch.org/docs/stable/notes/amp_examples.html",
    ),
)


def origin_sections(runs: Sequence[RunInfo], head: RunInfo) -> list[doc.Section]:
    """Machine and versions, the runs, where to read on."""
    return [
        doc.Section("Machine and versions", _machine(head)),
        doc.Section("The runs", _runs(runs)),
        doc.Section("Look again", _again(runs, head)),
    ]


def _machine(run: RunInfo) -> tuple[doc.Block, ...]:
    machine = run.machine
    if machine is None:
        return (doc.Paragraph("The run never started, so no machine was recorded."),)
    name = f"{machine.device_name} ({machine.device})" if machine.device_name else machine.device
    pairs = (
        ("Device", name),
        ("Capability", machine.capability or "not read"),
        ("Rules", rules(run)),
        ("Framework", machine.software),
        ("Python", machine.python or "not recorded"),
        ("Platform", machine.platform or "not recorded"),
        ("Report by", f"ampscope {__version__}"),
    )
    return (doc.Facts(pairs),)


def _runs(runs: Sequence[RunInfo]) -> tuple[doc.Block, ...]:
    rows = tuple(
        (r.id, _what(r), str(r.state), f"{r.steps_done:,}", moment(r.created), _took(r), r.message)
        for r in runs
    )
    columns = ("Id", "What", "State", "Recorded", "Made", "Took", "Said")
    return (doc.Table(columns, rows, numeric=(3,)),)


def _what(run: RunInfo) -> str:
    spec = run.spec
    if spec.kind == "script":
        return f"{file_name(spec.workload)} {Control(spec.control or BASELINE).words}"
    if spec.kind in ("lesson", "bench"):  # these have neither size nor precision
        return run.title
    return f"{file_name(spec.workload)} {spec.size} {spec.mode}"


def _took(run: RunInfo) -> str:
    if run.started is None or run.ended is None:
        return "not known"
    return duration(max(0.0, run.ended - run.started))


def moment(seconds: float) -> str:
    """A time that reads the same everywhere."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _again(runs: Sequence[RunInfo], head: RunInfo) -> tuple[doc.Block, ...]:
    together = " --together" if len(runs) > 1 else ""
    return (
        doc.Paragraph(
            "To hand on the measurements themselves, and to look at them in the dashboard:"
        ),
        doc.Code(
            f"ampscope runs export {head.id}{together} --out {head.id}.json\n"
            f"ampscope import {head.id}.json\n"
            "ampscope dashboard",
            "bash",
        ),
        doc.Links(_READ),
    )


def subject(run: RunInfo) -> str:
    """Which run a part is about."""
    spec = run.spec
    name = spec.label or file_name(spec.workload)
    kinds = {"script": "script", "watch": "watched training", "probe": "probe"}
    facts = [name, kinds.get(spec.kind, f"measurement ({spec.kind})"), str(run.state)]
    if spec.kind == "probe":
        facts.append(f"{file_name(spec.workload)} {spec.size} {spec.mode}, seed {spec.seed}")
    if spec.world > 1:
        facts.append(f"rank {spec.rank} of {spec.world}")
    if run.machine is not None and run.machine.policy == "rehearsal":
        facts.append(rules(run))
    facts += [plural(run.steps_done, "step" if spec.is_training else "result"), moment(run.created)]
    return " · ".join(facts)


FEW_STEPS = 20
NOTHING = "Nothing that this kind of run records is missing."


def of_diagnosis(reader: Reader, report: DiagnosisResult, head: RunInfo) -> tuple[doc.Block, ...]:
    """What the report of a script and its controls does not show, and why: "not recorded" is not
    "did not happen"."""
    found = [*_of_controls(report), *_of_run(reader, head)]
    unsure = [r for r, v in report.diagnosis.answers if v.status is Status.INCONCLUSIVE]
    if unsure:
        undecided = f"{plural(len(unsure), 'rule')} could not decide"
        found.append((undecided, "The table of every rule says why."))
    return listed(found)


def of_run(reader: Reader, run: RunInfo) -> tuple[doc.Block, ...]:
    """Of one recorded training, as :func:`of_diagnosis`."""
    return listed(list(_of_run(reader, run)))


def _of_controls(report: DiagnosisResult) -> Iterator[tuple[str, str]]:
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
        yield "A GPU", f"It ran under {rules(run)}; times say nothing about a GPU."
    if machine is not None and run.spec.kind == "probe":
        ran = ((op.op, dtype) for op in _ops(reader, run) for dtype in op.inputs.split(","))
        for gap in op_lists.met_by(ran, machine.policy):
            yield "CUDA's own arithmetic", gap.text
    roles = [role for role in Role if reader.frame_spans(run.id, role)]
    if not roles:
        yield "Exponent histograms", why_no_histograms(run)
    if run.spec.kind == "probe" and last_shadow_step(reader, run.id) is None:
        yield "The fp32 shadow", "Not recorded: lost values cannot be distinguished from zeros."
    if not reader.samples(run.id, 2):
        yield "Telemetry", "Load, memory and clocks of the machine were not read beside this run."


def _ops(reader: Reader, run: RunInfo) -> list[OpRecord]:
    """Of the run's first traced steps; later ones repeat them."""
    sets = {step.op_set for step in reader.steps(run.id)[:FEW_STEPS] if step.op_set is not None}
    return [op for number in sets for op in reader.ops(run.id, number)]


def listed(found: list[tuple[str, str]], otherwise: str = NOTHING) -> tuple[doc.Block, ...]:
    """As a table of what and why."""
    if not found:
        return (doc.Paragraph(otherwise),)
    return (doc.Table(("Missing", "Why"), tuple(found)),)


OPEN, DRAWN = 2, 6  # histograms of each role that stand open, and those with the folded ones
TABLE_ROWS = 12
ROLES = (Role.GRAD_OUTPUT, Role.ACTIVATION)  # in the dtype in which they really flow
ROLE_NAMES = {  # in the order in which they are offered
    Role.GRAD_OUTPUT: "output gradients",
    Role.WEIGHT_GRAD: "weight gradients",
    Role.ACTIVATION: "activations",
    Role.WEIGHT: "weights",
    Role.UPDATE: "weight updates",
}
Names = dict[int, str]


def histogram_sections(
    reader: Reader, run: RunInfo, module: str | None, step: int | None
) -> list[doc.Section]:
    """Those of the modules that matter against the zones of a half format; none where no histogram
    was recorded.

    They are shown as they were recorded: gradients still multiplied by the loss scale, which is
    what the format had to hold. The module of the verdict comes first, then those in most trouble.
    """
    names = {m.index: m.path or m.type for m in reader.modules(run.id)}
    wanted = next((m.index for m in reader.modules(run.id) if m.path == module), None)
    fmt = format_of(reader, run)
    blocks: list[doc.Block] = []
    for role in ROLES:
        frame = _frame(reader, run, role, step)
        if frame is not None and len(frame.modules):
            blocks += _of_role(merged(frame), names, fmt, wanted)
    if not blocks:
        return []
    see = (
        f"Elements by power of two, against the zones of {fmt.name}: lost below "
        f"2^{fmt.zero_below_exponent}, subnormal below 2^{fmt.min_normal_exponent}, overflow above "
        f"{fmt.max:,.6g}. Nothing is sampled or left out."
    )
    return [doc.Section("Exponent histograms", (doc.Paragraph(see), *blocks))]


def format_of(reader: Reader, run: RunInfo) -> NumberFormat:
    """bf16 where the run computed in it and not in fp16, else fp16."""
    if run.spec.kind == "probe":
        return FORMATS["bf16" if "bf16" in run.spec.precision else "fp16"]
    seen: set[str] = set()
    for role in ROLES:
        frame = _frame(reader, run, role, None)
        seen |= set(frame.dtypes) if frame is not None else set()
    return FORMATS["bf16" if "bf16" in seen and "fp16" not in seen else "fp16"]


def _frame(reader: Reader, run: RunInfo, role: Role, step: int | None) -> Frame | None:
    """At the step, or at the last one that was recorded before it; else the first, or the last."""
    spans = reader.frame_spans(run.id, role)
    if not spans:
        return None
    if step is None:
        return reader.frame(run.id, role, spans[-1][0])
    before = [first for first, _ in spans if first <= step]
    return reader.frame(run.id, role, before[-1] if before else spans[0][0])


def _of_role(frame: Frame, names: Names, fmt: NumberFormat, wanted: int | None) -> list[doc.Block]:
    counts = zone_counts(frame, fmt)
    troubles = trouble(counts)
    order = sorted(
        range(len(frame.modules)),
        key=lambda n: (frame.modules[n] != wanted, -troubles[n], n),
    )
    until = f" to {frame.last_step:,}" if frame.last_step is not None else ""
    scale = f", at loss scale {power_of_two(frame.scale)}" if frame.role.is_gradient else ""
    when = f"step {frame.step:,}{until}{scale}"
    role = ROLE_NAMES[frame.role]
    drawn = [
        doc.HistogramChart(
            f"{_name(names, frame.modules[n])}: {role}, {frame.dtypes[n]}, {when}",
            frame.rows[n],
            fmt,
            "magnitude, as recorded",
        )
        for n in order[:DRAWN]
    ]
    rows = tuple(
        (_name(names, frame.modules[n]), frame.dtypes[n], *_shares(counts[n].tolist()))
        for n in order[:TABLE_ROWS]
    )
    columns = ("Module", "Dtype", "Lost", "Subnormal", "Overflow", "Not finite")
    title = f"{role.capitalize()} of {plural(len(order), 'module')}"
    if len(order) > TABLE_ROWS:
        title += f", the {TABLE_ROWS} in most trouble"
    table = doc.Table(columns, rows, numeric=(2, 3, 4, 5))
    return [*drawn[:OPEN], doc.Fold(title, (table, *drawn[OPEN:]))]


def _shares(counts: list[int]) -> tuple[str, ...]:
    total = sum(counts)
    wanted = [counts[column] for column in (LOST, SUBNORMAL, OVERFLOW, NONFINITE)]
    return tuple(f"{n:,} ({percent(n / total)})" if n else "0" for n in wanted)


def _name(names: Names, module: int) -> str:
    return doc.line(names.get(module) or f"module {module}")


LOG_FROM = 100.0  # two decades between the smallest and the largest value
DASHES = ("", "9 6", "2 4", "9 4 2 4")  # SVG's stroke-dasharray
Look = tuple[str, str]  # colour, dash


def base(values: Sequence[float]) -> int:
    """Of the axis: 10 for positive values that are far apart, else 0, a linear one."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return 10 if low > 0 and high / low >= LOG_FROM else 0


def looks(names: Sequence[str]) -> list[Look]:
    """One for each name: a colour that is a dtype's where a dtype is meant, and a dash that tells
    curves of one colour apart. A name that begins with a dtype ("fp16-noscaler", "bf16 with fp32
    master weights") has that dtype's colour, every other the colour that means no dtype."""
    drawn: Counter[str] = Counter()
    found = []
    for name in names:
        first = re.split(r"\W", name, maxsplit=1)[0]
        colour = dtype_color(first) if first in DTYPES else MEASURE
        found.append((colour, DASHES[drawn[colour] % len(DASHES)]))
        drawn[colour] += 1
    return found
