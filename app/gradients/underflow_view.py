"""Zeros and subnormals over time, counted against the fp32 shadow: never one number."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.analysis.underflow import (
    UnderflowOverTime,
    from_columns,
    without_shadow,
    worst_modules,
)
from ampscope.records import Role, RunInfo
from ampscope.store.reader import Reader
from ampscope.store.series import shadow_columns
from app import chart, layout, links, states, store
from app.figures.underflow_lines import PANELS, UNSPLIT, Line, underflow_lines
from app.figures.underflow_map import underflow_map
from app.gradients import gradient_words
from app.gradients.gradient_map import TICK_LENGTH
from app.gradients.gradient_tables import Look, name_in
from app.gradients.gradient_terms import ROLE_NAMES, UNDERFLOW_NAMES, UNSPLIT_NAMES
from app.runs.module_names import short_names
from app.text import cut

SHOWN_MODULES = 40
_COLORS = {name: color for name, color, _ in (*PANELS, *UNSPLIT)}


def all_modules(run: RunInfo, look: Look, module: int) -> UnderflowOverTime | None:
    """Module by sampled step for one of the counts; None where there is no shadow."""
    st.subheader("Zero and subnormal over time", anchor=False)
    series = _series(run, look.view.role)
    if not series.steps:
        _say_inconclusive(run, look, module)
        return None
    layout.see(gradient_words.underflow_seen(series, look.names))
    choices = UNDERFLOW_NAMES if series.is_split else UNSPLIT_NAMES
    counted = links.pick("Count", "count", list(choices), format_func=lambda key: choices[key])
    rows = worst_modules(series, counted, SHOWN_MODULES)
    names = [look.names.get(series.modules[row], "?") for row in rows]
    if len(rows) < len(series.modules):
        st.caption(f"The {len(rows)} worst of {len(series.modules):,} modules.")
    figure = underflow_map(
        getattr(series, counted)[rows],
        series.total[rows],
        series.steps,
        short_names(names, TICK_LENGTH),
        names,
        _COLORS[counted],
    )
    chart.show(figure, "underflow", lambda: table(series, look.names), key="underflow-map")
    return series


def one_module(series: UnderflowOverTime, look: Look, module: int) -> None:
    """The counts of the chosen module over time."""
    name = name_in(look, module)
    if module not in series.modules:
        layout.see(f"No shadow was taken of {cut(name)}.")
        return
    row = series.modules.index(module)
    taken = [i for i, total in enumerate(series.total[row]) if total]
    totals = [int(series.total[row, i]) for i in taken]
    lines = {
        key: Line(
            [series.steps[i] for i in taken],
            [int(getattr(series, key)[row, i]) for i in taken],
            totals,
        )
        for key in _counted(series)
    }
    lost = [int(series.lost[row, i]) for i in taken]
    below = [int(series.below_range[row, i]) for i in taken] if series.is_split else None
    layout.see(gradient_words.lines_seen(name, lost, totals, below))
    figure = underflow_lines(lines)
    own = series.only(row)
    chart.show(figure, "underflow-module", lambda: table(own, look.names), key="underflow-lines")


def table(series: UnderflowOverTime, names: dict[int, str]) -> pd.DataFrame:
    """One line a module and sampled step."""
    cells = [
        (row, column)
        for row in range(len(series.modules))
        for column in range(len(series.steps))
        if series.total[row, column]
    ]
    return pd.DataFrame(
        {
            "step": [series.steps[c] for _, c in cells],
            "module": [names.get(series.modules[r], "?") for r, _ in cells],
            **{
                key: [int(getattr(series, key)[cell]) for cell in cells] for key in _counted(series)
            },
            "total": [int(series.total[cell]) for cell in cells],
        }
    )


def _counted(series: UnderflowOverTime) -> list[str]:
    return [key for key, _, _ in (PANELS if series.is_split else UNSPLIT)]


@store.of_run
def _series(reader: Reader, run_id: str, role: Role) -> UnderflowOverTime:
    return from_columns(shadow_columns(reader, run_id, role))


def _say_inconclusive(run: RunInfo, look: Look, module: int) -> None:
    place = look.frame.modules.index(module)
    known = without_shadow(look.frame.rows[place], look.frame.dtypes[place])
    role: Role = look.view.role
    how = "Start the probe with --shadow-every 10 for a count."
    if run.spec.kind != "probe" or run.spec.framework != "torch":
        how = (
            "Only probes of PyTorch take a shadow. A diagnosis compares a script with its fp32 "
            "control instead."
        )
    states.nothing_recorded(
        f"No fp32 shadow holds {ROLE_NAMES[role]} of this run.",
        f"{gradient_words.inconclusive(known, name_in(look, module), look.view.step)} {how}",
    )
