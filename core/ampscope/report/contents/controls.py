"""Losses of a script as it is, in fp32, in bf16 and with the fix, over one axis of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.loss_scale import finite_parts
from ampscope.records import RunInfo, StepRecord
from ampscope.report import fix_words
from ampscope.report.colours import MEASURE, of_dtype
from ampscope.report.contents.looks import base
from ampscope.report.document import Block, Lines, Paragraph, Series, Table
from ampscope.report.words.controls import control
from ampscope.report.words.numbers import number, share
from ampscope.store.reader import Reader
from ampscope.verdicts.report import Report

# What the script is as it is has no dtype of its own colour: it may be fp16 in one part only.
_LOOKS = {
    "as_is": (of_dtype("fp16"), ""),
    "fp32": (of_dtype("fp32"), "9 6"),
    "bf16": (of_dtype("bf16"), "2 4"),
}
_FIXED_LOOK = (MEASURE, "9 4 2 4")


@dataclass(frozen=True, slots=True)
class Control:
    """One run beside the others: exact counts, and the steps that are drawn."""

    name: str
    run: RunInfo
    steps: list[StepRecord]
    step_count: int
    skipped: int
    bad_losses: int


def recorded(reader: Reader, report: Report, points: int) -> list[Control]:
    """The three controls, and the fix that worked (else the last that was tried)."""
    wanted = [(control(word), word) for word in _LOOKS]
    cured = fix_words.chosen(report) or (report.trials[-1] if report.trials else None)
    if cured is not None and cured.control not in _LOOKS:
        kind = "fixed" if cured.cured else "tried"
        wanted.append((f"{kind}, {control(cured.control)}", cured.control))
    found = [(name, report.runs[word]) for name, word in wanted if word in report.runs]
    return [_read(reader, name, run, points) for name, run in found if not run.state.is_active]


def blocks(report: Report, found: list[Control]) -> tuple[Block, ...]:
    """The chart and a row for each."""
    drawn = [c for c in found if c.steps]
    rows = tuple(
        (
            c.name,
            _last(c.steps),
            share(c.bad_losses, c.step_count),
            share(c.skipped, c.step_count),
            _wrong(report, c.run),
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


def _read(reader: Reader, name: str, run: RunInfo, points: int) -> Control:
    totals = reader.step_totals(run.id)
    steps = reader.overview(run.id, points)
    return Control(name, run, steps, totals.steps, totals.skipped, totals.nonfinite_losses)


def _series(c: Control) -> Series:
    colour, dash = _LOOKS.get(c.run.spec.control, _FIXED_LOOK)
    parts = finite_parts([s.step for s in c.steps], [s.loss for s in c.steps])
    return Series(c.name, parts, colour, dash, tuple(s.step for s in c.steps if s.skipped))


def _last(steps: list[StepRecord]) -> str:
    losses = [s.loss for s in steps if s.loss is not None and not math.isnan(s.loss)]
    last = next((s.loss for s in reversed(steps) if s.loss is not None), None)
    return number(last) if last is not None or losses else "none"


def _wrong(report: Report, run: RunInfo) -> str:
    word = run.spec.control
    if word == "as_is":
        return "; ".join(report.diagnosis.symptoms) or "nothing"
    if word in report.control_symptoms:
        return "; ".join(report.control_symptoms[word]) or "nothing"
    trial = next((t for t in report.trials if t.control == word), None)
    if trial is None:
        return run.message or "not judged"
    if trial.cured is None:
        return fix_words.outcome(trial)
    return "nothing any more" if trial.cured else "the symptom or its cause is still there"
