"""A report before it has a form: sections of plain blocks, which HTML and Markdown both write out.

Every text in a block is plain text, whoever wrote it; the writer of each form escapes all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ampscope.analysis.loss_scale import FiniteParts
from ampscope.exponents import Raw
from ampscope.formats import NumberFormat


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Some sentences. ``lead`` is said in bold in front of them: "What to do." """

    text: str
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """Lines that keep their form: a patch, a command, a traceback."""

    text: str
    language: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts; ``numeric`` are the places of the columns that are aligned to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values: the machine, the run."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """One key figure, and in a few words what it means."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """At most four, side by side."""

    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. What is not finite has no place on it and stands in a band below; so do the steps
    that GradScaler left out."""

    name: str
    points: FiniteParts
    colour: str
    dash: str = ""  # SVG's stroke-dasharray
    skipped: tuple[int, ...] = ()
    is_stepped: bool = False  # holds its value until the next point, as a loss scale does


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over steps. ``base`` 0 is a linear axis, 2 or 10 a logarithmic one."""

    title: str
    y_title: str
    series: tuple[Series, ...]
    base: int = 0
    x_title: str = "optimizer step"


@dataclass(frozen=True, slots=True)
class Histogram:
    """One raw row (ampscope.exponents) against the zones of a format."""

    title: str
    row: Raw
    fmt: NumberFormat
    x_title: str = "magnitude"


@dataclass(frozen=True, slots=True)
class Link:
    """An address that ampscope itself names, never one from a run."""

    text: str
    address: str


@dataclass(frozen=True, slots=True)
class Links:
    """Where to read on."""

    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Details that are closed on a screen and open on paper."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What a report says of one run, diagnosis or measurement; ``title`` is its verdict."""

    title: str
    subject: str  # which run this is
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report."""

    parts: tuple[Part, ...]
    made: str  # by which ampscope, and when


Block: TypeAlias = Paragraph | Code | Table | Facts | Figures | Lines | Histogram | Links | Fold
