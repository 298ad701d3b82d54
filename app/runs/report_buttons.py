"""A run, a diagnosis or a measurement as a file to take home: made when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st

from ampscope.records import RunInfo
from ampscope.report.html.page import to_html
from ampscope.report.making import document, of_reports
from ampscope.report.markdown import to_markdown
from ampscope.report.notebook import to_notebook
from ampscope.store.reader import Reader
from app import chart, permissions, run_rows, store

NOTEBOOK = "application/x-ipynb+json"


def draw(run: RunInfo) -> None:
    """Files of ``run``; of a script's run, of its whole diagnosis."""
    if not _may_take(run):
        return
    with st.popover("Report", icon=":material/description:", type="tertiary"):
        st.caption("Verdict, evidence, charts, fix, machine, and what is missing; nothing is run.")
        _button(run, "HTML, one file", "html", "text/html", _html)
        _button(run, "Markdown, for an issue", "md", "text/markdown", _markdown)
        if permissions.is_trusted():  # it names the store's path, and reads all of the store
            _button(run, "Notebook that loads the run", "ipynb", NOTEBOOK, _notebook)


def _button(
    run: RunInfo, label: str, suffix: str, mime: str, made: Callable[[Reader, str], str]
) -> None:
    def content() -> bytes:
        permissions.require(_may_take(run), "this report")  # it may have been kept back since
        with Reader(store.path()) as reader:
            return made(reader, run.id).encode()

    name = f"ampscope-{run.id}.{suffix}"
    chart.file(label, content, name, mime, key=f"report-{suffix}-{run.id}")


def _may_take(run: RunInfo) -> bool:
    """Whether all that the report would show is open to whoever asks."""
    group = run.spec.group if run.spec.kind == "script" else ""
    runs = (run_rows.group(store.path(), group) if group else ()) or (run,)
    return len(permissions.visible(runs)) == len(runs)


def _html(reader: Reader, run_id: str) -> str:
    return to_html(document(reader, [run_id], folders=permissions.is_trusted()))


def _markdown(reader: Reader, run_id: str) -> str:
    return to_markdown(document(reader, [run_id], folders=permissions.is_trusted()))


def _notebook(reader: Reader, run_id: str) -> str:
    made = document(reader, [run_id])
    return to_notebook(made, of_reports(reader, [run_id]), Path(store.path().name))
