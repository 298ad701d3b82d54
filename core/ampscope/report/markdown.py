"""A document as GitHub-flavoured Markdown, for an issue tracker.

Texts from runs can make nothing of it: no link, no mention, no reference to an issue, no HTML, no
end of a table or of a code fence. In prose every mark that can begin something is escaped, as
CommonMark allows (spec.commonmark.org, section 2.4). GitHub looks for @names, #numbers, commits,
bare addresses and :emoji: after that, in the parsed text, so an invisible word joiner parts those.
Charts are left to the HTML report; here each says its figures in a table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

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


def to_markdown(document: Document) -> str:
    """The whole text; of one that would be longer than :data:`MAX_CHARACTERS` what fits, in order,
    with long code cut, and at the end what is left out."""
    end = f"*{escaped(document.made)}*\n"
    whole = "".join(f"{text}\n\n" for _, text in _pieces(document, CODE_LENGTH)) + end
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


def _pieces(document: Document, code: int) -> Iterator[tuple[str, str]]:
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


def escaped(text: str, length: int = TEXT_LENGTH) -> str:
    """``text`` as Markdown that shows exactly it, in one line."""
    parted = _SEEN_LATER.sub(lambda m: m[0] + JOINER, line(text, length))
    parted = _COMMIT.sub(lambda m: m[0] + JOINER, parted)
    return _START.sub(lambda m: m[0] + "\\", _MARKS.sub(r"\\\1", parted))


def fenced(text: str, language: str = "", length: int = CODE_LENGTH) -> str:
    """A code block; its fence is longer than any run of backticks in it."""
    shown = visible(text.rstrip("\n"), length)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language if language in _LANGUAGES else ''}\n{shown}\n{fence}"


def _block(block: Block, code: int) -> str:
    match block:
        case Paragraph():
            lead = f"**{escaped(block.lead)}** " if block.lead else ""
            return lead + escaped(block.text)
        case Code():
            return fenced(block.text, block.language, code)
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
            inside = "\n\n".join(_block(part, code) for part in block.blocks)
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
    columns = ("Curve", "First finite", "Lowest", "Highest", "Last finite", "Not finite",
               "Steps skipped")  # fmt: skip
    rows = tuple(_figures(series) for series in lines.series)
    return f"*{escaped(lines.title)}*\n\n{_table(Table(columns, rows, tuple(range(1, 7))))}"


def _figures(series: Series) -> tuple[str, ...]:
    values = series.points.values
    told = (values[0], min(values), max(values), values[-1]) if values else ()
    shown = [number(v) for v in told] or ["none"] * 4
    bad = plural(series.points.nonfinite_count, "step")
    return (series.name, *shown, bad, plural(len(series.skipped), "step"))
