"""Sections of blocks for the terminal: a frame for each that has a title.

Much of it is a script's own words; in an imported run it comes from an untrusted file. Each text
is spelled out by :mod:`ampscope.story.document`, so that none moves the cursor, names the window or
clears the screen. Charts are left to the pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ampscope.story import document as doc


def print_sections(sections: Iterable[doc.Section], console: Console) -> None:
    """Print one below the other, wrapped to the console's width."""
    for section in sections:
        for line in () if section.title else map(_block, section.blocks):
            console.print(line)
        if section.title:
            inside = Group(*map(_block, section.blocks))
            console.print(Panel(inside, title=escape(section.title), title_align="left"))


def print_line(paragraph: doc.Paragraph, console: Console) -> None:
    """Print a paragraph that no console breaks, for those who search its output."""
    console.print(_paragraph(paragraph), soft_wrap=True)


def _block(block: doc.Block) -> RenderableType:
    match block:
        case doc.Paragraph():
            return _paragraph(block)
        case doc.Code():
            code = doc.visible(block.text.rstrip(), doc.CODE_LENGTH)
            language = block.language or "text"
            return Syntax(code, language, background_color="default", word_wrap=True)
        case doc.Table():
            return _table(block)
        case doc.Chain():
            return _table(block.table)
        case doc.EvidenceBlock():  # the id of a run is of use where it can be clicked
            rows = tuple(row[:-1] for row in block.table.rows)
            return _table(doc.Table(block.table.columns[:-1], rows, block.table.numeric))
        case doc.Facts():
            return _table(doc.Table(("What", "Value"), block.pairs))
        case doc.Figures():
            figures = ((f.label, f.value, f.note) for f in block.figures)
            return _table(doc.Table(("", "", ""), tuple(figures)))
        case doc.Links():
            return Text("\n".join(f"{link.text}: {link.address}" for link in block.links))
        case doc.Fold():
            return Group(Text(doc.visible(block.title), "bold"), *map(_block, block.blocks))
        case doc.Lines() | doc.HistogramChart():
            return Text(f"{doc.line(block.title)}: a chart of the dashboard and of a report.")


def _paragraph(block: doc.Paragraph) -> Text:
    lead = Text(doc.visible(block.lead), "bold")
    text = Text(doc.visible(block.text), "dim" if block.is_quiet else "")
    return Text(" " if block.lead and block.text else "").join([lead, text])


def _table(block: doc.Table) -> Table:
    table = Table(show_edge=False)
    for place, name in enumerate(block.columns):
        table.add_column(name, justify="right" if place in block.numeric else "left")
    for row in block.rows:
        table.add_row(*(escape(doc.line(cell)) for cell in row))
    return table
