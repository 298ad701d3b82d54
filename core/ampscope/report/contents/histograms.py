"""Exponent histograms of the modules that matter, against the zones of a half format.

They are shown as they were recorded: gradients still multiplied by the loss scale, which is what
the format had to hold. The module of the verdict comes first, then those in most trouble.
"""

from __future__ import annotations

from ampscope.analysis.distribution import (
    LOST,
    NONFINITE,
    OVERFLOW,
    SUBNORMAL,
    merged,
    trouble,
    zone_counts,
)
from ampscope.formats import FORMATS, NumberFormat
from ampscope.records import Frame, Role, RunInfo
from ampscope.report.document import Block, Fold, Histogram, Paragraph, Section, Table
from ampscope.report.plain import line
from ampscope.report.words.numbers import percent, plural, power_of_two
from ampscope.store.reader import Reader

OPEN, DRAWN = 2, 6  # histograms of each role that stand open, and those with the folded ones
TABLE_ROWS = 12
ROLES = (Role.GRAD_OUTPUT, Role.ACTIVATION)  # in the dtype in which they really flow
ROLE_NAMES = {
    Role.GRAD_OUTPUT: "output gradients",
    Role.ACTIVATION: "activations",
}
Names = dict[int, str]


def sections(reader: Reader, run: RunInfo, module: str | None, step: int | None) -> list[Section]:
    """None where no histogram was recorded."""
    names = {m.index: m.path or m.type for m in reader.modules(run.id)}
    wanted = next((m.index for m in reader.modules(run.id) if m.path == module), None)
    fmt = format_of(reader, run)
    blocks: list[Block] = []
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
    return [Section("Exponent histograms", (Paragraph(see), *blocks))]


def _of_role(frame: Frame, names: Names, fmt: NumberFormat, wanted: int | None) -> list[Block]:
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
        Histogram(
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
    table = Table(columns, rows, numeric=(2, 3, 4, 5))
    return [*drawn[:OPEN], Fold(title, (table, *drawn[OPEN:]))]


def _shares(counts: list[int]) -> tuple[str, ...]:
    total = sum(counts)
    wanted = [counts[column] for column in (LOST, SUBNORMAL, OVERFLOW, NONFINITE)]
    return tuple(f"{n:,} ({percent(n / total)})" if n else "0" for n in wanted)


def _name(names: Names, module: int) -> str:
    return line(names.get(module) or f"module {module}")


def _frame(reader: Reader, run: RunInfo, role: Role, step: int | None) -> Frame | None:
    """At the step, or at the last one that was recorded before it; else the first, or the last."""
    spans = reader.frame_spans(run.id, role)
    if not spans:
        return None
    if step is None:
        return reader.frame(run.id, role, spans[-1][0])
    before = [first for first, _ in spans if first <= step]
    return reader.frame(run.id, role, before[-1] if before else spans[0][0])


def format_of(reader: Reader, run: RunInfo) -> NumberFormat:
    """bf16 where the run computed in it and not in fp16, else fp16."""
    if run.spec.kind == "probe":
        return FORMATS["bf16" if "bf16" in run.spec.precision else "fp16"]
    seen: set[str] = set()
    for role in ROLES:
        frame = _frame(reader, run, role, None)
        seen |= set(frame.dtypes) if frame is not None else set()
    return FORMATS["bf16" if "bf16" in seen and "fp16" not in seen else "fp16"]
