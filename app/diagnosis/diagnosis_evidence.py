"""Evidence of the root cause, each row with links to where it was measured."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from ampscope.diagnose import Finding
from ampscope.records import Role, RunInfo
from ampscope.report.words.controls import control, value
from ampscope.rules.verdict import Measurement
from ampscope.store.reader import Reader
from app import chart, layout, sitemap, store
from app.diagnosis.diagnosis_data import Case
from app.sitemap import Entry
from app.text import escape

WIDTHS = [4, 4, 3, 5]


def show(case: Case, finding: Finding) -> None:
    """A row for each measurement behind the verdict."""
    st.subheader("Evidence", anchor=False)
    rows = finding.verdict.evidence
    if not rows:
        layout.see("The verdict rests on the script's own error; its text is in the measurements.")
        return
    layout.see("Each number is followed to its run and step by the links beside it.")
    titles = ("Measured", "Value", "Run and step", "Look at it")
    for cell, title in zip(st.columns(WIDTHS), titles, strict=True):
        cell.caption(title)
    for measurement in rows:
        _row(case, finding, measurement)
    chart.download(lambda: _table(rows), "evidence", key="dx-evidence")


def _row(case: Case, finding: Finding, measured: Measurement) -> None:
    name, shown, where, links = st.columns(WIDTHS, vertical_alignment="center")
    run = case.run_of(measured.run or "as_is")
    step = measured.step
    name.markdown(escape(measured.name))
    limit = "" if measured.threshold is None else f", limit {value(measured.threshold)}"
    shown.markdown(f"**{escape(value(measured.value))}**{escape(limit)}")
    at = "" if step is None else f", step {step:,}"
    where.markdown(escape(control(measured.run or "as_is") + at))
    if run is None:
        links.caption("this run was deleted")
        return
    query = {"run": run.id} | ({} if step is None else {"step": str(step)})
    with links.container(horizontal=True, gap="small"):
        st.page_link(sitemap.DIAGNOSIS.file, label="Measurements", query_params=query)
        for entry in pages_with_data(run):
            module = {"module": finding.verdict.module} if finding.verdict.module else {}
            st.page_link(entry.file, label=entry.title, query_params=query | module)


def pages_with_data(run: RunInfo) -> list[Entry]:
    """The run's other pages that have something to show of it."""
    has_modules, has_histograms = _recorded(run)
    wanted = (
        (run.steps_done > 0, sitemap.LOSS_SCALE),
        (has_modules, sitemap.LAYERS),
        (has_histograms, sitemap.GRADIENTS),
    )
    return [entry for there, entry in wanted if there]


@store.of_run
def _recorded(reader: Reader, run_id: str) -> tuple[bool, bool]:
    """Whether there are modules, and histograms of any role."""
    return bool(reader.modules(run_id)), any(reader.frame_steps(run_id, role) for role in Role)


def _table(rows: tuple[Measurement, ...]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "measured": [m.name for m in rows],
            "value": [str(m.value) for m in rows],
            "limit": ["" if m.threshold is None else str(m.threshold) for m in rows],
            "control": [m.run for m in rows],
            "step": [m.step for m in rows],
        }
    )
