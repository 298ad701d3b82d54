"""The raw observations of a run, all of them or those of one step: what verdicts rest on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from ampscope.analysis.run_view import RunView
from ampscope.observations import BadOp, Observation, Operand, Scan
from ampscope.records import RunInfo
from ampscope.report.words.controls import control, value
from app import chart, layout, links, sitemap
from app.diagnosis import diagnosis_data
from app.diagnosis.diagnosis_data import Case
from app.text import escape, plural

ALL = "all steps"
TABLE_PX, UPRIGHT_PX = 320, 700
_STEP = "widget:measured-step"
_KEPT_START, _KEPT_END = "start", "end"  # moments of scans that belong to no one step


def show(case: Case, step: int | None) -> None:
    """A link for each run, then the tables: folded, unless the address names a step.

    The links lead to ``step``, where the verdict stands.
    """
    asked = st.query_params.get("step")
    names = run_names(case.runs)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown("All that was recorded of the script, run", width="content")
        for run_id, name in names.items():
            st.page_link(
                sitemap.DIAGNOSIS.file,
                label=escape(name),
                query_params={"run": run_id, "step": str(step or 0)},
            )
    with st.expander("Measurements", expanded=asked is not None):
        runs = {r.id: r for r in case.runs}
        run_id = links.select(
            "Run",
            "run",
            list(runs),
            default=case.head.id,
            format_func=lambda id_: f"{names[id_]}, {runs[id_].state}",
        )
        run = diagnosis_data.view(runs[run_id])
        step = _pick_step(run, asked)
        _tables(run, step)


def run_names(runs: Sequence[RunInfo]) -> dict[str, str]:
    """Run id -> its control in words; a control's second run is called that."""
    names: dict[str, str] = {}
    for run in runs:
        name = control(run.spec.control)
        before = sum(r.spec.control == run.spec.control for r in runs[: len(names)])
        names[run.id] = f"{name}, again" if before else name
    return names


def _pick_step(run: RunView, asked: str | None) -> int | None:
    """The step of the address when the run has it; None for all."""
    steps = [str(a) for a in sorted({a.attempt for a in run.attempts})]
    options = [ALL, *steps]
    st.session_state[_STEP] = asked if asked in steps else ALL
    st.selectbox("Step", options, key=_STEP, on_change=_step_chosen, help="Type to search.")
    if asked is not None and asked not in steps:
        st.caption("This run did not reach the step that the address names; all steps are shown.")
    return int(asked) if asked is not None and asked in steps else None


def _step_chosen() -> None:
    chosen = st.session_state[_STEP]
    links.keep("step", None if chosen == ALL else chosen)


def _tables(run: RunView, step: int | None) -> None:
    when = "over all steps" if step is None else f"at step {step:,}"
    parts: list[tuple[str, Sequence[Observation]]] = [
        ("Optimizer steps", [a for a in run.attempts if step in (None, a.attempt)]),
        ("Bad ops", [b for b in run.bad_ops if step is None or _was_bad_at(b, step)]),
        ("Calls", [c for c in run.calls if step in (None, c.attempt)]),
        ("Gradients of parameters", [g for g in run.gradients if step in (None, g.attempt)]),
        ("Tensors looked at", [s for s in run.scans if step is None or _scanned_at(s, step)]),
        ("Uses of ops", [u for u in run.uses if step in (None, u.attempt)]),
        ("How it ended", [run.outcome]),
    ]
    counted = [plural(len(rows), _singular(name)) for name, rows in parts[:3]]
    layout.see(f"Recorded {when}: {', '.join(counted)}.")
    for name, rows in parts:
        if rows:
            _table(name, rows)


def _table(name: str, rows: Sequence[Observation]) -> None:
    key = f"dx-{name.lower().replace(' ', '-')}"
    st.markdown(f"**{escape(name)}**")
    table = frame(rows)
    shown, most = (upright(table), UPRIGHT_PX) if len(rows) == 1 else (table, TABLE_PX)
    height = min(most, 38 + 35 * len(shown))
    st.dataframe(shown, key=key, hide_index=True, height=height)
    chart.download(lambda: table, key, key=key)


def frame(rows: Sequence[Observation]) -> pd.DataFrame:
    """A column for each field that any row fills. A column with NaN or Inf becomes text, because a
    table shows them as nothing."""
    fields = [f.name for f in dataclasses.fields(rows[0])]
    columns = {name: [getattr(row, name) for row in rows] for name in fields}
    return pd.DataFrame(
        {
            name.replace("_", " "): _readable(values)
            for name, values in columns.items()
            if any(v not in (None, "", ()) for v in values)
        }
    )


def upright(table: pd.DataFrame) -> pd.DataFrame:
    """A single row of twenty columns reads better from top to bottom."""
    row = table.iloc[0]
    values = [value(v) if isinstance(v, float) else str(v) for v in row.tolist()]
    return pd.DataFrame({"field": table.columns, "value": values})


def _readable(values: list[object]) -> list[object]:
    if any(isinstance(v, tuple) for v in values):
        return ["; ".join(map(_part, v)) if isinstance(v, tuple) else v for v in values]
    if any(isinstance(v, float) and not math.isfinite(v) for v in values):
        return [value(v) if isinstance(v, float) else "" if v is None else v for v in values]
    return values


def _part(part: object) -> str:
    if isinstance(part, Operand):
        shape = "×".join(map(str, part.shape)) or "scalar"
        text = f"{part.dtype} {shape}, {value(part.min_abs)} to {value(part.max_abs)}"
        extra = [
            f"{n:,} {what}"
            for n, what in ((part.zeros, "zero"), (part.nonfinite, "not finite"))
            if n
        ]
        return ", ".join([text, *extra])
    return value(part) if isinstance(part, float) else str(part)


def _was_bad_at(op: BadOp, step: int) -> bool:
    return op.attempt <= step <= max(op.attempt, op.last_attempt)


def _scanned_at(scan: Scan, step: int) -> bool:
    return scan.attempt == step or scan.moment in (_KEPT_START, _KEPT_END)


def _singular(name: str) -> str:
    return name.lower().removesuffix("s")
