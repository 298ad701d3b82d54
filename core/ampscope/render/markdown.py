"""A document as GitHub-flavoured Markdown, for an issue tracker.

Texts from runs can make nothing of it: no link, no mention, no reference to an issue, no HTML, no
end of a table or of a code fence. In prose every mark that can begin something is escaped, as
CommonMark allows (spec.commonmark.org, section 2.4). GitHub looks for @names, #numbers, commits,
bare addresses and :emoji: after that, in the parsed text, so an invisible word joiner parts those.
Charts are left to the HTML report; here each says its figures in a table.

A notebook (:func:`to_notebook`) has such prose between its cells.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampscope.number_words import number, plural
from ampscope.records import RunInfo
from ampscope.story import document as doc

JOINER = "\u2060"  # word joiner: no width, no line break
MAX_ROWS = 40
# What an issue or a comment of GitHub holds ("Body is too long (maximum is 65536 characters)").
MAX_CHARACTERS = 65_536
SHORT_CODE = 4_000  # of a traceback where the whole would be longer: its first and last frames
END_LENGTH = 2_000  # kept free for what stands below: by whom it was made, what is left out
_MARKS = re.compile(r"([\\`*_\[\]<>|~&$!{}])")
# What makes a list, a heading or a definition of the first word of a line.
_START = re.compile(rf"^(?:(\d[\d{JOINER}]*)(?=[.)])|(?=[-+#=:]))")
_SEEN_LATER = re.compile(
    r"@(?=\w)|#(?=\w)|GH-(?=\d)|:(?=//)|www(?=\.)|:(?=[\w+-]+:)|\$", re.IGNORECASE
)
_COMMIT = re.compile(r"\b(?=[0-9a-f]{7,40}\b)(?![0-9a-f]{12}\b)([0-9a-f]{4})", re.IGNORECASE)
_LANGUAGES = {"python", "bash"}


def to_markdown(document: doc.Document) -> str:
    """The whole text; of one that would be longer than :data:`MAX_CHARACTERS` what fits, in order,
    with long code cut, and at the end what is left out."""
    end = f"*{escaped(document.made)}*\n"
    whole = "".join(f"{text}\n\n" for _, text in _pieces(document, doc.CODE_LENGTH)) + end
    if len(whole) <= MAX_CHARACTERS:
        return whole
    room = MAX_CHARACTERS - END_LENGTH
    kept: list[str] = []
    left_out: Counter[str] = Counter()
    for section, text in _pieces(document, SHORT_CODE):
        if len(text) + 2 > room:
            left_out[section] += 1
            continue
        kept.append(f"{text}\n\n")
        room -= len(text) + 2
    return "".join(kept) + _left_out(left_out) + end


def _pieces(document: doc.Document, code: int) -> Iterator[tuple[str, str]]:
    """Headings and blocks, each with the section that it is of."""
    for part in document.parts:
        yield "Titles", f"# {escaped(part.title)}\n\n{escaped(part.subject)}"
        for section in part.sections:
            yield section.title, f"## {escaped(section.title)}"
            for block in section.blocks:
                yield section.title, _block(block, code)


def _left_out(left_out: Counter[str]) -> str:
    """Sections have titles of ours, about 15 different ones: this fits into END_LENGTH."""
    named = "; ".join(f"{title} ({count:,})" for title, count in left_out.items())
    what = f"Left out: {named}. " if named else ""
    why = f"Long code is cut: an issue holds {MAX_CHARACTERS:,} characters."
    return f"*{escaped(f'{what}{why} The HTML report has everything.', END_LENGTH // 2)}*\n\n"


def _block(block: doc.Block, code: int) -> str:
    match block:
        case doc.Paragraph():
            lead = f"**{escaped(block.lead)}** " if block.lead else ""
            return lead + escaped(block.text)
        case doc.Code():
            return fenced(block.text, block.language, code)
        case doc.Table():
            return _table(block)
        case doc.Chain() | doc.EvidenceBlock():
            return _table(block.table)
        case doc.Facts():
            return "\n".join(f"- {escaped(k)}: {escaped(v)}" for k, v in block.pairs)
        case doc.Figures():
            return "\n".join(
                f"- {escaped(f.label)}: **{escaped(f.value)}**"
                + (f" ({escaped(f.note)})" if f.note else "")
                for f in block.figures
            )
        case doc.Lines():
            return _lines(block)
        case doc.HistogramChart():
            return f"*{escaped(block.title)}: a chart in the HTML report.*"
        case doc.Links():
            return "\n".join(f"- [{escaped(x.text)}]({x.address})" for x in block.links)
        case doc.Fold():
            inside = "\n\n".join(_block(part, code) for part in block.blocks)
            # Within the summary GitHub reads HTML, so its text is made of nothing that HTML knows.
            return f"<details><summary>{_summary(block.title)}</summary>\n\n{inside}\n\n</details>"


def _summary(title: str) -> str:
    text = doc.line(title).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SEEN_LATER.sub(lambda m: m[0] + JOINER, text)


def _lines(lines: doc.Lines) -> str:
    columns = ("Curve", "First finite", "Lowest", "Highest", "Last finite", "Not finite",
               "Steps skipped")  # fmt: skip
    rows = tuple(_figures(series) for series in lines.series)
    return f"*{escaped(lines.title)}*\n\n{_table(doc.Table(columns, rows, tuple(range(1, 7))))}"


def _figures(series: doc.Series) -> tuple[str, ...]:
    values = series.points.values
    told = (values[0], min(values), max(values), values[-1]) if values else ()
    shown = [number(v) for v in told] or ["none"] * 4
    bad = plural(series.points.nonfinite_count, "step")
    return (series.name, *shown, bad, plural(len(series.skipped), "step"))


def _table(table: doc.Table) -> str:
    rules = [" ---: " if n in table.numeric else " --- " for n in range(len(table.columns))]
    lines = [_row(table.columns), f"|{'|'.join(rules)}|"]
    lines += [_row(row) for row in table.rows[:MAX_ROWS]]
    if len(table.rows) > MAX_ROWS:
        lines += ["", f"The first {MAX_ROWS} of {len(table.rows):,} rows."]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(escaped(cell, 300) or ' ' for cell in cells)} |"


def escaped(text: str, length: int = doc.TEXT_LENGTH) -> str:
    """``text`` as Markdown that shows exactly it, in one line."""
    parted = _SEEN_LATER.sub(lambda m: m[0] + JOINER, doc.line(text, length))
    parted = _COMMIT.sub(lambda m: m[0] + JOINER, parted)
    return _START.sub(lambda m: m[0] + "\\", _MARKS.sub(r"\\\1", parted))


def fenced(text: str, language: str = "", length: int = doc.CODE_LENGTH) -> str:
    """A code block; its fence is longer than any run of backticks in it."""
    shown = doc.visible(text.rstrip("\n"), length)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language if language in _LANGUAGES else ''}\n{shown}\n{fence}"


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
from ampscope.diagnosis.load import load_diagnosis

report = load_diagnosis(reader, infos[0].id)  # what was concluded; nothing is run
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
from ampscope.numerics.histogram import zones
from ampscope.numerics.formats import FORMATS
from ampscope.records import Role
from ampscope.story.shared import format_of

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


def to_notebook(document: doc.Document, infos: Sequence[RunInfo], source: Path) -> str:
    """A notebook that loads the runs of a report, so that a reader can ask the next question: the
    .ipynb file, written as JSON by hand (nbformat 4:
    nbformat.readthedocs.io/en/latest/format_description.html). Its code cells use ampscope's
    reading side alone and hold no text from a run but ids, as literals. ``infos`` are the runs that
    it opens, ``source`` the store they are in: its name alone, where the notebook is handed on."""
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
        cells += [_words("## The verdict, as it was concluded"), _code(_VERDICT)]
    cells.append(_code(_CLOSE))
    for place, cell in enumerate(cells):
        cell["id"] = f"cell-{place}"
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


def _head(document: doc.Document) -> str:
    texts: list[str] = []
    for part in document.parts:
        texts += [f"# {escaped(part.title)}", escaped(part.subject)]
        first = part.sections[0] if part.sections else None
        if first is not None and first.title == "Verdict":
            texts += [escaped(b.text) for b in first.blocks if isinstance(b, doc.Paragraph)]
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
