"""A notebook that loads the runs of a report, so that a reader can ask the next question.

Written as JSON by hand (nbformat 4: nbformat.readthedocs.io/en/latest/format_description.html). Its
code cells use ampscope's reading side alone and hold no text from a run but ids, as literals.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ampscope.records import RunInfo
from ampscope.report.document import Document, Paragraph
from ampscope.report.markdown import escaped

_OPEN = """\
from pathlib import Path

import ampscope
from ampscope.store.db import default_path

# The store that was read. A file of `ampscope runs export` can stand here just as well.
SOURCE = Path({source})
if not SOURCE.exists():  # not beside this notebook: where commands without --store keep runs
    SOURCE = default_path()
RUNS = {runs}

reader = ampscope.open_store(SOURCE)
infos = [reader.run(run) for run in RUNS]
for info in infos:
    print(info.id, info.state, info.title, f"{{info.steps_done:,}} steps")
"""
_STEPS = """\
import dataclasses

import pandas as pd

steps = {
    info.id: pd.DataFrame([dataclasses.asdict(s) for s in reader.overview(info.id, points=2000)])
    for info in infos
}
steps[infos[0].id].tail()
"""
_PLOT = """\
from html import escape  # plotly reads a little HTML in names

import plotly.graph_objects as go

figure = go.Figure()
for info in infos:
    table = steps[info.id]
    if len(table):
        name = info.spec.control or info.title
        figure.add_trace(go.Scatter(x=table["step"], y=table["loss"], name=escape(name[:60])))
figure.update_layout(xaxis_title="optimizer step", yaxis_title="loss")
figure
"""
_VERDICT = """\
from ampscope.verdicts.recall import recall

report = recall(reader, infos[0].id)  # judged anew from what was recorded; nothing is run
print(report.diagnosis.verdict)
for finding in report.diagnosis.findings:
    print(finding.cause, finding.verdict.module, finding.verdict.reason)
"""
_RESULTS = """\
results = pd.DataFrame(
    [{"record": type(r).__name__, **dataclasses.asdict(r)} for r in reader.results(infos[0].id)]
)
results
"""
_HISTOGRAMS = """\
from ampscope.exponents import zones
from ampscope.formats import FORMATS
from ampscope.records import Role
from ampscope.report.contents.histograms import format_of

fmt = format_of(reader, infos[0])  # against whose zones the report shows them
names = {m.index: m.path for m in reader.modules(infos[0].id)}
for role in Role:
    for first, _ in reader.frame_spans(infos[0].id, role)[-1:]:
        frame = reader.frame(infos[0].id, role, first)
        for module, row in zip(frame.modules, frame.rows):
            found = zones(row, fmt)
            said = f"{found.lost:,} of {found.total:,} would be lost in {fmt.name}"
            print(role, first, names.get(module), said)
"""
_CLOSE = "reader.close()\n"


def to_notebook(document: Document, infos: Sequence[RunInfo], source: Path) -> str:
    """The .ipynb file. ``infos`` are the runs that it opens, ``source`` the store they are
    in: its name alone, where the notebook is handed on."""
    is_script = all(info.spec.kind == "script" for info in infos)
    is_training = all(info.spec.is_training for info in infos)
    opening = _OPEN.format(source=ascii(str(source)), runs=ascii([info.id for info in infos]))
    cells = [_words(_head(document)), _code(opening), _code(_STEPS)]
    if is_training:
        cells += [_words("## Loss"), _code(_PLOT)]
        cells += [_words("## Exponent histograms"), _code(_HISTOGRAMS)]
    else:
        cells += [_words("## What was measured"), _code(_RESULTS)]
    if is_script:
        cells += [_words("## The verdict, computed here"), _code(_VERDICT)]
    cells.append(_code(_CLOSE))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "cells": cells,
    }
    return json.dumps(notebook, indent=1) + "\n"


def _head(document: Document) -> str:
    texts: list[str] = []
    for part in document.parts:
        texts += [f"# {escaped(part.title)}", escaped(part.subject)]
        first = part.sections[0] if part.sections else None
        if first is not None and first.title == "Verdict":
            texts += [escaped(b.text) for b in first.blocks if isinstance(b, Paragraph)]
    return "\n\n".join([*texts, escaped(document.made)])


def _words(text: str) -> dict[str, object]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str) -> dict[str, object]:
    return {
        "cell_type": "code",
        "metadata": {},
        "source": text.rstrip().splitlines(keepends=True),
        "execution_count": None,
        "outputs": [],
    }
