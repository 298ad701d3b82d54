"""The controls side by side: the same script as it is, in fp32, in bf16, and with the fix."""

from __future__ import annotations

import math

import pandas as pd
import streamlit as st

from ampscope.analysis.loss_scale import finite_parts
from ampscope.records import RunInfo, StepRecord
from ampscope.report import fix_words
from ampscope.report.words.controls import control
from ampscope.verdicts.report import Report
from app import chart, layout, store
from app.diagnosis.diagnosis_data import Case
from app.figures.control_losses import Curve, control_losses
from app.palette import MEASURE, OTHER_DTYPE, dtype_color
from app.text import escape, number, share

# What the script is as it is has no dtype of its own colour: it may be fp16 in one part only.
_LOOKS = {
    "as_is": (dtype_color("fp16"), "solid"),
    "fp32": (dtype_color("fp32"), "dash"),
    "bf16": (dtype_color("bf16"), "dot"),
}
_FIXED_LOOK = (MEASURE, "dashdot")


def show(case: Case, report: Report) -> None:
    """The chart, a row for each control, and the way to its measurements."""
    st.subheader("The controls side by side", anchor=False)
    shown = _shown(case, report)
    recorded = [(name, run, store.steps(run)) for name, run in shown]
    layout.see(_seen(recorded))
    curves = [_curve(name, run, steps) for name, run, steps in recorded if steps]
    if curves:
        figure = control_losses(curves)
        chart.show(figure, "controls", lambda: _losses(recorded), key="dx-controls")
    st.table(_table(report, recorded).set_index("Control"), border="horizontal")


def _shown(case: Case, report: Report) -> list[tuple[str, RunInfo]]:
    """Name and run: the three controls, and the fix that worked (else the last that was tried)."""
    wanted = [(control(word), word) for word in _LOOKS]
    cured = fix_words.chosen(report) or (report.trials[-1] if report.trials else None)
    if cured is not None and cured.control not in _LOOKS:
        wanted.append(
            (f"{'fixed' if cured.cured else 'tried'}, {control(cured.control)}", cured.control)
        )
    found = [(name, case.run_of(word)) for name, word in wanted]
    return [(name, run) for name, run in found if run is not None and not run.state.is_active]


def _curve(name: str, run: RunInfo, steps: list[StepRecord]) -> Curve:
    color, dash = _LOOKS.get(run.spec.control, _FIXED_LOOK)
    parts = finite_parts([s.step for s in steps], [s.loss for s in steps])
    return Curve(name, parts, color or OTHER_DTYPE, dash)


def _seen(recorded: list[tuple[str, RunInfo, list[StepRecord]]]) -> str:
    parts = []
    for name, _, steps in recorded:
        losses = [s.loss for s in steps if s.loss is not None]
        parts.append(f"{name} {number(losses[-1]) if losses else 'no step'}")
    return f"Last loss: {'; '.join(parts)}." if parts else "No run has ended yet."


def _table(report: Report, recorded: list[tuple[str, RunInfo, list[StepRecord]]]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Control": [escape(name) for name, _, _ in recorded],
            "Last loss": [_last(steps) for _, _, steps in recorded],
            "Losses not finite": [_broken(steps) for _, _, steps in recorded],
            "Skipped": [share(sum(s.skipped for s in t), len(t)) for _, _, t in recorded],
            "What went wrong": [escape(_wrong(report, run)) for _, run, _ in recorded],
        }
    )


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


def _last(steps: list[StepRecord]) -> str:
    losses = [s.loss for s in steps if s.loss is not None]
    return number(losses[-1]) if losses else "none"


def _broken(steps: list[StepRecord]) -> str:
    losses = [s.loss for s in steps if s.loss is not None]
    return share(sum(not math.isfinite(x) for x in losses), len(losses))


def _losses(recorded: list[tuple[str, RunInfo, list[StepRecord]]]) -> pd.DataFrame:
    rows = [
        (name, run.id, s.step, number(s.loss) if s.loss is None else repr(s.loss), s.skipped)
        for name, run, steps in recorded
        for s in steps
    ]
    return pd.DataFrame(rows, columns=["control", "run", "step", "loss", "skipped"])
