"""A report before it has a form: sections of plain blocks, which HTML and Markdown both write out.

Every text in a block is plain text, no matter where it comes from; the writer of each form escapes
all of it.

Texts from runs are made harmless by :func:`visible`.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import TypeAlias

from ampscope.analysis.training import FiniteParts
from ampscope.control import Control
from ampscope.number_words import value
from ampscope.numerics.formats import NumberFormat
from ampscope.numerics.histogram import Raw


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report."""

    parts: tuple[Part, ...]
    made: str  # by which ampscope, and when


@dataclass(frozen=True, slots=True)
class Part:
    """What a report says of one run, diagnosis or measurement; ``title`` is its verdict."""

    title: str
    subject: str  # which run this is
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Some sentences. ``lead`` is said in bold in front of them: "What to do." ``is_quiet``: a
    remark in small letters."""

    text: str
    lead: str = ""
    is_quiet: bool = False


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
class ChainLink:
    """What happened, with its numbers. ``is_nonfinite``: NaN or Inf is there."""

    title: str
    detail: str
    is_nonfinite: bool = False
    is_root: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """From a cause to what a person sees, in order."""

    links: tuple[ChainLink, ...]

    @property
    def table(self) -> Table:
        """For what draws no boxes."""
        rows = tuple(
            (str(n), link.title, link.detail, _step(link.step))
            for n, link in enumerate(self.links, 1)
        )
        return Table(("", "What", "Detail", "Step"), rows, numeric=(3,))


@dataclass(frozen=True, slots=True)
class Measured:
    """A number behind a verdict, and the ``control`` under which it was measured. ``run_id`` is ""
    of a run that was deleted."""

    name: str
    value: float | str
    limit: float | str | None
    control: str
    step: int | None
    run_id: str


@dataclass(frozen=True, slots=True)
class EvidenceBlock:
    """The measurements that a verdict rests on."""

    measured: tuple[Measured, ...]

    @property
    def table(self) -> Table:
        """For what has no links to the pages of a run."""
        rows = tuple(
            (
                m.name,
                value(m.value),
                "" if m.limit is None else value(m.limit),
                Control(m.control).words,
                _step(m.step),
                m.run_id,
            )
            for m in self.measured
        )
        return Table(("Measured", "Value", "Limit", "Run", "Step", "Id"), rows, numeric=(1, 2, 4))


def _step(step: int | None) -> str:
    return "" if step is None else f"{step:,}"


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
    run_id: str = ""
    not_recorded: tuple[int, ...] = ()  # steps without a value


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over steps. ``base`` 0 is a linear axis, 2 or 10 a logarithmic one."""

    title: str
    y_title: str
    series: tuple[Series, ...]
    base: int = 0
    x_title: str = "optimizer step"


@dataclass(frozen=True, slots=True)
class HistogramChart:
    """One raw row (ampscope.numerics.histogram) against the zones of a format."""

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


Block: TypeAlias = (
    Paragraph
    | Code
    | Table
    | Chain
    | EvidenceBlock
    | Facts
    | Figures
    | Lines
    | HistogramChart
    | Links
    | Fold
)
TEXT_LENGTH = 4_000  # of a paragraph; a reason of the rules has at most about 1,000
NAME_LENGTH = 300  # in tables and charts; module paths of real models have about 100
CODE_LENGTH = 40_000  # a traceback; Python's own end after 1,000 frames
_KEPT = {"\n", "\t"}
# Control, format (bidirectional marks, joiners, BOM), surrogate, private use, line and paragraph
# separators, unassigned: unicode.org/reports/tr44, General_Category.
_SPELLED = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Cn"}


def visible(text: str, length: int = TEXT_LENGTH) -> str:
    """Text from a run as plain text that cannot mislead: what is invisible or turns the line round
    is spelled as Python would, and what is longer than about ``length`` is cut in the middle.

        visible("a\\x1b[31mb")   ->  'a\\\\x1b[31mb'
        visible("\\u202egpj.x")  ->  '\\\\u202egpj.x'
    """
    return "".join(map(_spelled, shortened(text, length)))


def line(text: str, length: int = NAME_LENGTH) -> str:
    """``text`` in one line, spelled as by :func:`visible`, cut to about ``length`` characters."""
    return visible(" ".join(text.split()), length)


def _spelled(char: str) -> str:
    if char in _KEPT or unicodedata.category(char) not in _SPELLED:
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shortened(text: str, length: int) -> str:
    """Cut in the middle, saying how much is left out."""
    if len(text) <= length:
        return text
    left, right = length * 2 // 3, length // 3
    return f"{text[:left]} … {len(text) - left - right:,} characters … {text[-right:]}"
