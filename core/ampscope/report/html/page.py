"""A document as one HTML file: no network, no other file, readable from disk and on paper.

Its Content-Security-Policy names the hashes of the one style sheet and the one script that ampscope
ships, and nothing else: whatever a text from a run managed to be, the browser would neither run it,
nor load anything, nor send anything. The last line of defence; the first is :mod:`.element`.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterator
from functools import cache
from importlib import resources

from ampscope.errors import BadInput
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
    Part,
    Table,
)
from ampscope.report.html.bars import bars
from ampscope.report.html.curves import curves
from ampscope.report.html.element import Markup, element, joined
from ampscope.report.plain import CODE_LENGTH, line, visible

MAX_BYTES = 5_000_000  # what an issue tracker and a mail take; a diagnosis has about 0.1 MB

LONG_WORD = 24  # characters; in tables longer ones are broken


def to_html(document: Document) -> str:
    """The file. Raises BadInput where it would be larger than :data:`MAX_BYTES`."""
    numbers = itertools.count(1)
    parts = [_part(part, n, numbers) for n, part in enumerate(document.parts, 1)]
    title = document.parts[0].title if document.parts else "ampscope"
    body = joined(
        element("header", element("p", "ampscope report", class_="quiet"), _contents(document)),
        element("main", *parts),
        element("footer", element("p", document.made)),
    )
    text = _frame(line(title), body)
    if len(text.encode()) > MAX_BYTES:
        size = len(text.encode()) / 1e6
        raise BadInput(f"The report would have {size:.1f} MB, more than 5. Name fewer runs.")
    return text


@cache
def policy() -> str:
    """The Content-Security-Policy of every report."""
    return (
        f"default-src 'none'; script-src {_hash('script.js')}; style-src {_hash('style.css')}; "
        "base-uri 'none'; form-action 'none'"
    )


def _frame(title: str, body: Markup) -> str:
    head = joined(
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head.html}<style>{_resource("style.css")}</style>'
        f"</head><body>{body.html}<script>{_resource('script.js')}</script></body></html>\n"
    )


@cache
def _resource(name: str) -> str:
    """One of our own files; neither can hold the end of the element that it stands in."""
    text = resources.files("ampscope.report.html").joinpath(name).read_text(encoding="utf-8")
    if "</" in text or "<!--" in text:
        raise ValueError(f"{name} would end its own element")
    return text


def _hash(name: str) -> str:
    digest = hashlib.sha256(_resource(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _contents(document: Document) -> Markup | None:
    """Links to the sections."""
    entries = [
        element("li", element("a", section.title, href=f"#part-{n}-{m}"))
        for n, part in enumerate(document.parts, 1)
        for m, section in enumerate(part.sections, 1)
    ]
    return element("nav", element("ul", *entries), aria_label="Sections") if entries else None


def _part(part: Part, number: int, numbers: Iterator[int]) -> Markup:
    sections = [
        element(
            "section",
            element("h2", section.title, id=f"part-{number}-{place}"),
            *(_block(block, numbers) for block in section.blocks),
        )
        for place, section in enumerate(part.sections, 1)
    ]
    return element(
        "article",
        element("h1", visible(part.title, 1000)),
        element("p", line(part.subject, 1000), class_="quiet"),
        *sections,
        class_="part",
    )


def _block(block: Block, numbers: Iterator[int]) -> Markup:
    match block:
        case Paragraph():
            lead = element("strong", f"{block.lead} ") if block.lead else None
            return element("p", lead, visible(block.text))
        case Code():
            return element("pre", element("code", visible(block.text.rstrip(), CODE_LENGTH)))
        case Table():
            return _table(block)
        case Facts():
            pairs = [joined(element("dt", k), element("dd", line(v))) for k, v in block.pairs]
            return element("dl", *pairs, class_="facts")
        case Figures():
            return _figures(block)
        case Lines():
            return curves(block, f"chart-{next(numbers)}")
        case Histogram():
            return bars(block)
        case Links():
            links = [
                element("li", element("a", x.text, href=x.address, rel="noopener noreferrer"))
                for x in block.links
            ]
            return element("ul", *links)
        case Fold():
            inside = [_block(part, numbers) for part in block.blocks]
            return element("details", element("summary", line(block.title)), *inside)


def _table(table: Table) -> Markup:
    def cells(tag: str, row: tuple[str, ...]) -> list[Markup]:
        return [_cell(tag, line(text), place in table.numeric) for place, text in enumerate(row)]

    head = element("thead", element("tr", *cells("th", table.columns)))
    rows = [element("tr", *cells("td", row)) for row in table.rows]
    return element("div", element("table", head, element("tbody", *rows)), class_="table")


def _cell(tag: str, text: str, is_number: bool) -> Markup:
    """A column is as wide as its longest word, unless that is one to break."""
    is_long = any(len(word) > LONG_WORD for word in text.split(" "))
    return element(tag, text, class_="number" if is_number else "long" if is_long else None)


def _figures(figures: Figures) -> Markup:
    boxes = [
        element(
            "div",
            element("dt", f.label),
            element("dd", line(f.value), element("div", line(f.note), class_="note")),
        )
        for f in figures.figures
    ]
    return element("dl", *boxes, class_="figures")
