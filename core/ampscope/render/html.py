"""A report as one HTML file that needs nothing else: no network, no other file, no eval. It is
readable from disk and on paper.

First the document, then its charts as SVG, in units of about a pixel; last the one way in which
elements are made.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ampscope.analysis.distribution import aligned, occupied_range
from ampscope.errors import BadInput
from ampscope.number_words import number, percent, raised
from ampscope.numerics import histogram as bins
from ampscope.numerics.formats import NumberFormat
from ampscope.story import document as doc
from ampscope.story.palette import NONFINITE, OUTLINE, ZONES

MAX_BYTES = 5_000_000  # what an issue tracker and a mail take; a diagnosis has about 0.1 MB

LONG_WORD = 24  # characters; in tables longer ones are broken


def to_html(document: doc.Document) -> str:
    """The file. Raises BadInput where it would be larger than :data:`MAX_BYTES`."""
    numbers = itertools.count(1)
    parts = [_part(part, n, numbers) for n, part in enumerate(document.parts, 1)]
    title = document.parts[0].title if document.parts else "ampscope"
    body = joined(
        element("header", element("p", "ampscope report", class_="quiet"), _contents(document)),
        element("main", *parts),
        element("footer", element("p", document.made)),
    )
    text = _frame(doc.line(title), body)
    if len(text.encode()) > MAX_BYTES:
        size = len(text.encode()) / 1e6
        raise BadInput(f"The report would have {size:.1f} MB, more than 5. Name fewer runs.")
    return text


def _contents(document: doc.Document) -> Markup | None:
    """Links to the sections."""
    entries = [
        element("li", element("a", section.title, href=f"#part-{n}-{m}"))
        for n, part in enumerate(document.parts, 1)
        for m, section in enumerate(part.sections, 1)
    ]
    return element("nav", element("ul", *entries), aria_label="Sections") if entries else None


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
def policy() -> str:
    """The Content-Security-Policy of every report. It names the hashes of the one style sheet and
    the one script that ampscope ships, and nothing else: whatever a text from a run managed to be,
    the browser would neither run it, nor load anything, nor send anything. The last line of
    defence; the first is :func:`element`."""
    return (
        f"default-src 'none'; script-src {_hash('script.js')}; style-src {_hash('style.css')}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(name: str) -> str:
    digest = hashlib.sha256(_resource(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _resource(name: str) -> str:
    """One of our own files; neither can hold the end of the element that it stands in."""
    text = resources.files("ampscope.render").joinpath(name).read_text(encoding="utf-8")
    if "</" in text or "<!--" in text:
        raise ValueError(f"{name} would end its own element")
    return text


def _part(part: doc.Part, place: int, numbers: Iterator[int]) -> Markup:
    sections = [
        element(
            "section",
            element("h2", section.title, id=f"part-{place}-{place}"),
            *(_block(block, numbers) for block in section.blocks),
        )
        for place, section in enumerate(part.sections, 1)
    ]
    return element(
        "article",
        element("h1", doc.visible(part.title, 1000)),
        element("p", doc.line(part.subject, 1000), class_="quiet"),
        *sections,
        class_="part",
    )


def _block(block: doc.Block, numbers: Iterator[int]) -> Markup:
    match block:
        case doc.Paragraph():
            lead = element("strong", f"{block.lead} ") if block.lead else None
            kind = "quiet" if block.is_quiet else None
            return element("p", lead, doc.visible(block.text), class_=kind)
        case doc.Code():
            return element(
                "pre", element("code", doc.visible(block.text.rstrip(), doc.CODE_LENGTH))
            )
        case doc.Table():
            return _table(block)
        case doc.Chain() | doc.EvidenceBlock():
            return _table(block.table)
        case doc.Facts():
            pairs = [joined(element("dt", k), element("dd", doc.line(v))) for k, v in block.pairs]
            return element("dl", *pairs, class_="facts")
        case doc.Figures():
            return _figures(block)
        case doc.Lines():
            return curves(block, f"chart-{next(numbers)}")
        case doc.HistogramChart():
            return bars(block)
        case doc.Links():
            links = [
                element("li", element("a", x.text, href=x.address, rel="noopener noreferrer"))
                for x in block.links
            ]
            return element("ul", *links)
        case doc.Fold():
            inside = [_block(part, numbers) for part in block.blocks]
            return element("details", element("summary", doc.line(block.title)), *inside)


def _table(table: doc.Table) -> Markup:
    def cells(tag: str, row: tuple[str, ...]) -> list[Markup]:
        return [
            _cell(tag, doc.line(text), place in table.numeric) for place, text in enumerate(row)
        ]

    head = element("thead", element("tr", *cells("th", table.columns)))
    rows = [element("tr", *cells("td", row)) for row in table.rows]
    return element("div", element("table", head, element("tbody", *rows)), class_="table")


def _cell(tag: str, text: str, is_number: bool) -> Markup:
    """A column is as wide as its longest word, unless that is one to break."""
    is_long = any(len(word) > LONG_WORD for word in text.split(" "))
    return element(tag, text, class_="number" if is_number else "long" if is_long else None)


def _figures(figures: doc.Figures) -> Markup:
    boxes = [
        element(
            "div",
            element("dt", f.label),
            element("dd", doc.line(f.value), element("div", doc.line(f.note), class_="note")),
        )
        for f in figures.figures
    ]
    return element("dl", *boxes, class_="figures")


TOP, BOTTOM = 10.0, 250.0
ROW, FOOT = 30.0, 42.0
FEW_POINTS = 60  # so few have dots
NAME_LENGTH = 60
DIGITS = 6


def curves(lines: doc.Lines, identifier: str) -> Markup:
    """Curves over steps, with a legend, a drawing that is whole without a script, and its data:
    script.js adds a read-out, zoom and switches for the curves, by moving what is drawn here.

    Values that are not finite, and steps that GradScaler left out, have rows of their own below the
    plot, so that none is dropped. All lines keep their width when they are stretched; dots are
    lines of no length with round ends, so they stay round.
    """
    place = _plot(lines)
    if place is None:
        return element("p", f"{lines.title}: nothing was recorded.")
    rows, x, y = place
    return element(
        "figure",
        element("figcaption", doc.line(lines.title)),
        _legend(lines),
        curves_drawing(lines, identifier),
        data(f"{identifier}-data", _numbers(lines, rows, x, y)),
        class_="lines",
        data_chart=identifier,
    )


def _legend(lines: doc.Lines) -> Markup:
    keys = []
    for place, series in enumerate(lines.series):
        sample = element(
            "svg",
            element(
                "path",
                d="M1 7h30",
                stroke=series.colour,
                stroke_dasharray=series.dash or None,
                class_="line",
            ),
            viewBox="0 0 32 14",
            class_="key",
            aria_hidden="true",
        )
        name = doc.line(series.name, NAME_LENGTH)
        keys.append(element("span", sample, name, class_="entry", data_s=str(place)))
    return element("p", *keys, class_="legend")


def _numbers(lines: doc.Lines, rows: list[Row], x: Axis, y: Axis) -> dict[str, object]:
    """What the script reads; places in the drawing follow from the axes."""
    return {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end, y.base],
        "series": [
            {
                "name": doc.line(s.name, NAME_LENGTH),
                "x": s.points.steps,
                "y": [float(f"{v:.{DIGITS}g}") for v in s.points.values],
            }
            for s in lines.series
        ],
        "rows": [{"name": row.name, "x": row.steps} for row in rows],
    }


def curves_drawing(lines: doc.Lines, identifier: str, **attributes: float) -> Markup | None:
    """The curves, axes and rows alone, an ``svg`` element with ``attributes`` (x, y, width,
    height); None where nothing was recorded."""
    place = _plot(lines)
    if place is None:
        return None
    rows, x, y = place
    height = curves_height(lines)
    return element(
        "svg",
        element("title", doc.line(lines.title)),
        _clip(identifier, BOTTOM - TOP, TOP),
        _clip(f"{identifier}-rows", ROW * len(rows) + 4, BOTTOM),
        drawn_y(y, LEFT, WIDTH - RIGHT, lines.y_title),
        element(
            "g",
            element(
                "g", *(_curve(n, s, x, y) for n, s in enumerate(lines.series)), class_="curves"
            ),
            clip_path=f"url(#{identifier}-clip)",
        ),
        *_drawn_rows(rows, x, identifier),
        drawn_x(x, height - FOOT + 4, lines.x_title),
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        **attributes,
    )


def curves_height(lines: doc.Lines) -> float:
    """Of :func:`curves_drawing`, in the units of its view box."""
    return BOTTOM + ROW * sum(1 for series in lines.series for _ in _rows(series)) + FOOT


def _plot(lines: doc.Lines) -> tuple[list[Row], Axis, Axis] | None:
    """Rows below the plot and both axes; None where nothing was recorded."""
    rows = [row for series in lines.series for row in _rows(series)]
    steps = [s for series in lines.series for s in series.points.steps]
    steps += [s for row in rows for s in row.steps]
    if not steps:
        return None
    values = [v for series in lines.series for v in series.points.values]
    return rows, steps_axis(steps), values_axis(values, lines.base, TOP, BOTTOM)


@dataclass(frozen=True, slots=True)
class Row:
    """Steps below the plot: of what, and the sign that stands for each."""

    name: str
    steps: tuple[int, ...]
    sign: str  # SVG path commands after "M x y"
    is_nonfinite: bool


def _rows(series: doc.Series) -> Iterator[Row]:
    points, name = series.points, doc.line(series.name, NAME_LENGTH)
    kinds = (
        ("NaN", points.nan_steps, "h0"),
        ("+Inf", points.pos_inf_steps, "v-9"),
        ("−Inf", points.neg_inf_steps, "v9"),
    )
    for kind, steps, sign in kinds:
        if steps:
            yield Row(f"{name}: {kind}", steps, sign, True)
    if series.skipped:
        yield Row(f"{name}: step skipped", series.skipped, "m0 -5v10", False)


def _clip(identifier: str, height: float, top: float) -> Markup:
    box = element("rect", x=LEFT, y=top, width=WIDTH - LEFT - RIGHT, height=height)
    return element("clipPath", box, id=f"{identifier}-clip")


def _curve(place: int, series: doc.Series, x: Axis, y: Axis) -> Markup:
    look = {"stroke": series.colour, "fill": "none"}
    dots = None
    if len(series.points.steps) <= FEW_POINTS and not series.is_stepped:
        places = _places(series, x, y)
        dots = element(
            "path", d="".join(f"M{a} {b}h0" for _, a, b in places), class_="dots", **look
        )
    path = _path(series, x, y)
    drawn = element("path", d=path, stroke_dasharray=series.dash or None, class_="line", **look)
    return element("g", drawn, dots, data_s=str(place))


def _path(series: doc.Series, x: Axis, y: Axis) -> str:
    """With gaps where the value was not finite: a line must not bridge them."""
    points = series.points
    broken = sorted((*points.nan_steps, *points.pos_inf_steps, *points.neg_inf_steps))
    parts: list[str] = []
    before, at = None, 0
    for step, a, b in _places(series, x, y):
        while at < len(broken) and broken[at] < step:
            before, at = None, at + 1
        if before is None:
            parts.append(f"M{a} {b}")
        else:
            parts.append(f"H{a}V{b}" if series.is_stepped else f"L{a} {b}")
        before = step
    return "".join(parts)


def _places(series: doc.Series, x: Axis, y: Axis) -> Iterator[tuple[int, str, str]]:
    for step, value in zip(series.points.steps, series.points.values, strict=True):
        yield step, f"{x.place(step):.6g}", f"{y.place(value):.6g}"


def _drawn_rows(rows: list[Row], x: Axis, identifier: str) -> Iterator[Markup]:
    names, signs = [], []
    for place, row in enumerate(rows):
        top = BOTTOM + ROW * place
        names.append(element("text", row.name, x=LEFT + 4, y=top + 13))
        path = "".join(f"M{x.place(step):.6g} {top + 22:.6g}{row.sign}" for step in row.steps)
        kind = "bad" if row.is_nonfinite else "skip"
        colour = NONFINITE if row.is_nonfinite else None
        signs.append(element("path", d=path, class_=f"sign {kind}", stroke=colour))
    yield element("g", *names, class_="words")
    yield element(
        "g", element("g", *signs, class_="rows"), clip_path=f"url(#{identifier}-rows-clip)"
    )


WIDTH = 900.0
LEFT, RIGHT = 74.0, 18.0
TICKS = 6
MOST = 1e300  # beyond it the sums below would leave the doubles; drawn at the edge
_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """Where a value lies in a drawing, and which are marked: values from ``low`` to ``high`` lie
    between the places ``start`` and ``end``, where y grows downwards; ``base`` 0 is linear, 2 or 10
    logarithmic."""

    low: float
    high: float
    start: float
    end: float
    base: int = 0

    def place(self, value: float) -> float:
        """Where ``value`` lies."""
        low, high, at = (self._linear(x) for x in (self.low, self.high, value))
        span = high - low or 1.0  # of values that only differ where a float cannot
        return self.start + (at - low) / span * (self.end - self.start)

    def _linear(self, value: float) -> float:
        value = min(max(value, -MOST), MOST)
        return math.log(value, self.base) if self.base else value

    def ticks(self) -> list[float]:
        """Round values, about :data:`TICKS` of them."""
        if self.base:
            low = math.ceil(self._linear(self.low) - 1e-9)
            high = math.floor(self._linear(self.high) + 1e-9)
            every = max(1, math.ceil((high - low) / TICKS))
            powers = [float(self.base) ** n for n in range(low, high + 1, every)]
            if len(powers) > 1:
                return powers
        return _round_values(self.low, self.high)

    def label(self, value: float) -> str:
        """A tick in words."""
        exponent = math.log2(value) if self.base == 2 and value > 0 else 0.5
        return raised(int(exponent)) if exponent.is_integer() else number(value)


def steps_axis(steps: Sequence[int]) -> Axis:
    """The x axis of curves over steps."""
    low, high = float(min(steps)), float(max(steps))
    pad = max(0.5, 0.01 * (high - low))
    return Axis(low - pad, high + pad, LEFT, WIDTH - RIGHT)


def values_axis(values: Sequence[float], base: int, top: float, bottom: float) -> Axis:
    """The y axis of curves, with a little room above and below. A logarithmic one needs values
    above zero; without them it is linear."""
    if not values:
        return Axis(0.0, 1.0, bottom, top)
    low, high = max(min(values), -MOST), min(max(values), MOST)
    if base and low > 0:
        return Axis(low / 1.1, high * 1.1, bottom, top, base)
    pad = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Axis(low - pad, high + pad, bottom, top)


def drawn_x(axis: Axis, bottom: float, title: str) -> Markup:
    """Whole steps below the plot, and what they count."""
    found = [t for t in axis.ticks() if float(t).is_integer()]
    labels = [
        element("text", f"{t:,.0f}", x=axis.place(t), y=bottom + 15, text_anchor="middle")
        for t in found
    ]
    name = element(
        "text", title, x=(axis.start + axis.end) / 2, y=bottom + 32, text_anchor="middle"
    )
    return element("g", element("g", *labels, class_="xticks"), name, class_="words")


def drawn_y(axis: Axis, left: float, right: float, title: str) -> Markup:
    """Lines across the plot with their values, and what they measure."""
    parts = []
    for tick in axis.ticks():
        y = axis.place(tick)
        parts.append(element("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(element("text", axis.label(tick), x=left - 6, y=y + 4, text_anchor="end"))
    middle = (axis.start + axis.end) / 2
    name = element(
        "text", title, transform=f"translate(13,{middle:.6g}) rotate(-90)", text_anchor="middle"
    )
    return element("g", element("g", *parts, class_="yticks"), name, class_="words")


def _round_values(low: float, high: float) -> list[float]:
    rough = (high - low) / TICKS
    if not rough > 0 or not math.isfinite(rough):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((s * power for s in _STEPS if s * power >= rough), 10 * power)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)][: 4 * TICKS]


BARS_TOP, BARS_BOTTOM, HEIGHT = 62.0, 230.0, 272.0
ZERO_X, MIDDLE_X, RIGHT_X = LEFT + 4, LEFT + 78, WIDTH - 118
SIDE_BAR, SIDE_STEP = 24.0, 34.0
MIN_LABEL = 56.0  # a zone narrower than this has no room for its name
LEAST = 0.5  # the log axis starts below 1, so that a single element has a bar
_SIDES = (
    (ZERO_X, "zero", (("+0", bins.POS_ZERO), ("−0", bins.NEG_ZERO))),
    (RIGHT_X, "nonfinite", (("NaN", bins.NAN), ("+Inf", bins.POS_INF), ("−Inf", bins.NEG_INF))),
)
_KINDS = {"zero": "zero when recorded", "nonfinite": "not finite"}


def bars(histogram: doc.HistogramChart) -> Markup:
    """One exponent histogram as bars in the zones of a format; zeros on the left, NaN and Inf on
    the right. What a bar counts is its title, which a browser shows by itself and the script reads
    out."""
    caption = element("figcaption", doc.line(histogram.title))
    return element("figure", caption, bars_drawing(histogram), class_="bars")


def bars_drawing(histogram: doc.HistogramChart, **attributes: float) -> Markup:
    """The bars, axes and limits alone, an ``svg`` element with ``attributes`` (x, y, width,
    height)."""
    row, fmt = histogram.row, histogram.fmt
    shown = bins.exponent_range(occupied_range(row[None, :], [0]), fmt)
    counts = aligned(row[None, :], [0], shown.lowest, shown.highest)[0].tolist()
    total = max(int(row.sum()), 1)
    y = Axis(LEAST, max(float(row.max()), 1.0) * 1.5, BARS_BOTTOM, BARS_TOP, 10)
    x = Axis(shown.lowest, shown.highest + 1, MIDDLE_X, RIGHT_X - 8)
    parts: list[Markup] = []
    for zone, first, end in bins.zone_spans(fmt, shown):
        parts += _zone(zone, first, end, x)
        for exponent in range(first, end):
            count = counts[exponent - shown.lowest]
            if count:
                place = x.place(exponent) + 0.4, x.place(exponent + 1) - 0.4
                parts.append(_bar(place, count, y, total, raised(exponent), zone))
    for start, zone, names in _SIDES:
        for nth, (name, column) in enumerate(names):
            left = start + SIDE_STEP * nth
            parts.append(_words(name, left + SIDE_BAR / 2, BARS_BOTTOM + 15))
            if row[column]:
                parts.append(_bar((left, left + SIDE_BAR), int(row[column]), y, total, name, zone))
    return element(
        "svg",
        element("title", doc.line(histogram.title)),
        drawn_y(y, LEFT, WIDTH - 12, "elements (log)"),
        *parts,
        *_limits(fmt, x),
        *_exponents(shown, x),
        _words(histogram.x_title, (MIDDLE_X + RIGHT_X) / 2, BARS_BOTTOM + 34),
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        role="img",
        **attributes,
    )


def _bar(
    place: tuple[float, float], count: int, y: Axis, total: int, name: str, zone: str
) -> Markup:
    said = f"{name}: {count:,} of {total:,}, {percent(count / total)}, {_KINDS.get(zone, zone)}"
    top = y.place(count)
    return element(
        "rect", element("title", said), x=place[0], y=top, width=place[1] - place[0],
        height=BARS_BOTTOM - top, fill=ZONES[zone], stroke=OUTLINE, stroke_width=0.5,
    )  # fmt: skip


def _zone(zone: str, first: int, end: int, x: Axis) -> Iterator[Markup]:
    """Its band above the plot, with its name where there is room."""
    if end <= first:
        return
    left, right = x.place(first), x.place(end)
    yield element(
        "rect", x=left, y=BARS_TOP - 14, width=right - left, height=8.0, fill=ZONES[zone],
        stroke=OUTLINE, stroke_width=0.5,
    )  # fmt: skip
    if right - left >= MIN_LABEL:
        yield _words(zone, (left + right) / 2, BARS_TOP - 19, "middle", "zone")


def _limits(fmt: NumberFormat, x: Axis) -> Iterator[Markup]:
    largest = f"{fmt.max:,.0f}" if fmt.max < 1e6 else f"{fmt.max:.1e}"
    subnormal, normal = fmt.min_subnormal_exponent, fmt.min_normal_exponent
    found = (
        (subnormal, "end", f"min subnormal {raised(subnormal)} "),
        (normal, "start", f" min normal {raised(normal)}"),
        (math.log2(fmt.max), "start", f" max {largest}"),
    )
    for value, anchor, words in found:
        at = x.place(value)
        yield element("line", x1=at, x2=at, y1=BARS_TOP - 6, y2=BARS_BOTTOM, class_="limit")
        yield _words(words.strip(), at, BARS_TOP - 36, anchor)


def _exponents(shown: bins.ExponentRange, x: Axis) -> Iterator[Markup]:
    every = max(4, 4 * math.ceil(shown.width / 48))
    for exponent in range(-(-shown.lowest // every) * every, shown.highest + 1, every):
        yield _words(raised(exponent), x.place(exponent), BARS_BOTTOM + 15)


def _words(text: str, x: float, y: float, anchor: str = "middle", kind: str = "") -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor, class_=f"words {kind}".strip())


_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*\Z")
_ADDRESS = re.compile(r"(#[a-z0-9-]+|https://[a-z0-9./_-]+)\Z")
_VOID = {"meta", "br", "col"}
_REFUSED = {"style", "script", "iframe", "object", "embed", "base", "form", "link"}
WHOLE = 10**9  # a text whose block has cut it already


@dataclass(frozen=True, slots=True)
class Markup:
    """HTML that is safe to put anywhere in a body."""

    html: str


Child = Markup | str | None


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """One element; its texts and attributes are always escaped.

        element("td", run.label, class_="name")      ->  <td class="name">…</td>

    A string is text, never markup; markup comes from here alone. There is no way to write an event
    handler or an inline style, and an address is one of our own or a place in this file. Attribute
    names take a trailing or inner underscore for Python's sake.
    """
    if not _NAME.match(tag) or tag.lower() in _REFUSED:
        raise ValueError(f"<{tag}> is no element of a report")
    start = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Markup(f"<{tag}{start}>")
    return Markup(f"<{tag}{start}>{joined(*children).html}</{tag}>")


def _attribute(name: str, value: str | float | bool | None) -> str:
    name = name.rstrip("_").replace("_", "-")
    if not _NAME.match(name) or name.lower().startswith("on") or name.lower() == "style":
        raise ValueError(f"{name} is no attribute of a report")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    text = doc.visible(value, WHOLE) if isinstance(value, str) else f"{value:.10g}"
    if name in ("href", "src", "action") and not _ADDRESS.match(text):
        raise ValueError(f"{text!r} is no address of a report")
    return f' {name}="{html.escape(text)}"'


def joined(*children: Child) -> Markup:
    """Elements and texts one after the other."""
    return Markup("".join(_child(child) for child in children))


def _child(child: Child) -> str:
    if child is None:
        return ""
    return child.html if isinstance(child, Markup) else html.escape(doc.visible(child, WHOLE))


def data(identifier: str, value: object) -> Markup:
    """Numbers and texts for the script, as JSON that no parser of HTML can take for anything else:
    ``<``, ``>`` and ``&`` are spelled as escapes (html.spec.whatwg.org, restrictions for contents
    of script elements). It is data: a browser does not run it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    name = html.escape(identifier)
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')
