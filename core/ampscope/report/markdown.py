"""A document as GitHub-flavoured Markdown, for an issue tracker.

Texts from runs can make nothing of it: no link, no mention, no reference to an issue, no HTML, no
end of a table or of a code fence. In prose every mark that can begin something is escaped, as
CommonMark allows (spec.commonmark.org, section 2.4). GitHub looks for @names, #numbers, commits,
bare addresses and :emoji: after that, in the parsed text, so an invisible word joiner parts those.
Charts are left to the HTML report; here each says its figures in a table.
"""

from __future__ import annotations

import re

from ampscope.report.document import (
    Block,
    Code,
    Document,
    Facts,
    Figures,
    Fold,
    Histogram,
    Lines,
    Links,
    Paragraph,
    Series,
    Table,
)
from ampscope.report.plain import CODE_LENGTH, TEXT_LENGTH, line, visible
from ampscope.report.words.numbers import number, plural

JOINER = "\u2060"  # word joiner: no width, no line break
MAX_ROWS = 40
# GitHub's issues hold 65,536 characters; each block below is bounded, and so are the parts.
_MARKS = re.compile(r"([\\`*_\[\]<>|~&$!{}])")
# What makes a list, a heading or a definition of the first word of a line.
_START = re.compile(rf"^(?:(\d[\d{JOINER}]*)(?=[.)])|(?=[-+#=:]))")
_SEEN_LATER = re.compile(
    r"@(?=\w)|#(?=\w)|GH-(?=\d)|:(?=//)|www(?=\.)|:(?=[\w+-]+:)|\$", re.IGNORECASE
)
_COMMIT = re.compile(r"\b(?=[0-9a-f]{7,40}\b)(?![0-9a-f]{12}\b)([0-9a-f]{4})", re.IGNORECASE)
_LANGUAGES = {"python", "bash"}


def to_markdown(document: Document) -> str:
    """The whole text."""
    lines: list[str] = []
    for part in document.parts:
        lines += [f"# {escaped(part.title)}", "", escaped(part.subject), ""]
        for section in part.sections:
            lines += [f"## {escaped(section.title)}", ""]
            for block in section.blocks:
                lines += [_block(block), ""]
    return "\n".join([*lines, f"*{escaped(document.made)}*", ""])


def escaped(text: str, length: int = TEXT_LENGTH) -> str:
    """``text`` as Markdown that shows exactly it, in one line."""
    parted = _SEEN_LATER.sub(lambda m: m[0] + JOINER, line(text, length))
    parted = _COMMIT.sub(lambda m: m[0] + JOINER, parted)
    return _START.sub(lambda m: m[0] + "\\", _MARKS.sub(r"\\\1", parted))


def fenced(text: str, language: str = "") -> str:
    """A code block; its fence is longer than any run of backticks in it."""
    shown = visible(text.rstrip("\n"), CODE_LENGTH)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language if language in _LANGUAGES else ''}\n{shown}\n{fence}"


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            lead = f"**{escaped(block.lead)}** " if block.lead else ""
            return lead + escaped(block.text)
        case Code():
            return fenced(block.text, block.language)
        case Table():
            return _table(block)
        case Facts():
            return "\n".join(f"- {escaped(k)}: {escaped(v)}" for k, v in block.pairs)
        case Figures():
            return "\n".join(
                f"- {escaped(f.label)}: **{escaped(f.value)}**"
                + (f" ({escaped(f.note)})" if f.note else "")
                for f in block.figures
            )
        case Lines():
            return _lines(block)
        case Histogram():
            return f"*{escaped(block.title)}: a chart in the HTML report.*"
        case Links():
            return "\n".join(f"- [{escaped(x.text)}]({x.address})" for x in block.links)
        case Fold():
            inside = "\n\n".join(_block(part) for part in block.blocks)
            # Within the summary GitHub reads HTML, so its text is made of nothing that HTML knows.
            return f"<details><summary>{_summary(block.title)}</summary>\n\n{inside}\n\n</details>"


def _summary(title: str) -> str:
    text = line(title).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SEEN_LATER.sub(lambda m: m[0] + JOINER, text)


def _table(table: Table) -> str:
    rules = [" ---: " if n in table.numeric else " --- " for n in range(len(table.columns))]
    lines = [_row(table.columns), f"|{'|'.join(rules)}|"]
    lines += [_row(row) for row in table.rows[:MAX_ROWS]]
    if len(table.rows) > MAX_ROWS:
        lines += ["", f"The first {MAX_ROWS} of {len(table.rows):,} rows."]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(escaped(cell, 300) or ' ' for cell in cells)} |"


def _lines(lines: Lines) -> str:
    columns = ("Curve", "First", "Lowest", "Highest", "Last", "Not finite", "Steps skipped")
    rows = tuple(_figures(series) for series in lines.series)
    return f"*{escaped(lines.title)}*\n\n{_table(Table(columns, rows, tuple(range(1, 7))))}"


def _figures(series: Series) -> tuple[str, ...]:
    values = series.points.values
    told = (values[0], min(values), max(values), values[-1]) if values else ()
    shown = [number(v) for v in told] or ["none"] * 4
    bad = plural(series.points.nonfinite_count, "step")
    return (series.name, *shown, bad, plural(len(series.skipped), "step"))
