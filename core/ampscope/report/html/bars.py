"""One exponent histogram as bars in the zones of a format; zeros on the left, NaN and Inf on the
right. What a bar counts is its title, which a browser shows by itself and the script reads out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ampscope.analysis.distribution import aligned, occupied_range
from ampscope.analysis.exponent_zones import ExponentRange, exponent_range, zone_spans
from ampscope.exponents import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO
from ampscope.formats import NumberFormat
from ampscope.report.colours import OUTLINE, ZONES
from ampscope.report.document import Histogram
from ampscope.report.html.axes import LEFT, WIDTH, Axis, drawn_y
from ampscope.report.html.element import Markup, element
from ampscope.report.plain import line
from ampscope.report.words.numbers import percent

TOP, BOTTOM, HEIGHT = 62.0, 230.0, 272.0
ZERO_X, MIDDLE_X, RIGHT_X = LEFT + 4, LEFT + 78, WIDTH - 118
SIDE_BAR, SIDE_STEP = 24.0, 34.0
MIN_LABEL = 56.0  # a zone narrower than this has no room for its name
LEAST = 0.5  # the log axis starts below 1, so that a single element has a bar
_SIDES = (
    (ZERO_X, "zero", (("+0", POS_ZERO), ("−0", NEG_ZERO))),
    (RIGHT_X, "nonfinite", (("NaN", NAN), ("+Inf", POS_INF), ("−Inf", NEG_INF))),
)


def bars(histogram: Histogram) -> Markup:
    """A figure."""
    row, fmt = histogram.row, histogram.fmt
    shown = exponent_range(occupied_range(row[None, :], [0]), fmt)
    counts = aligned(row[None, :], [0], shown.lowest, shown.highest)[0].tolist()
    total = max(int(row.sum()), 1)
    y = Axis(LEAST, max(float(row.max()), 1.0) * 1.5, BOTTOM, TOP, 10)
    x = Axis(shown.lowest, shown.highest + 1, MIDDLE_X, RIGHT_X - 8)
    parts: list[Markup] = []
    for zone, first, end in zone_spans(fmt, shown):
        parts += _zone(zone, first, end, x)
        for exponent in range(first, end):
            count = counts[exponent - shown.lowest]
            if count:
                place = x.place(exponent) + 0.4, x.place(exponent + 1) - 0.4
                parts.append(_bar(place, count, y, total, f"2^{exponent}", zone))
    for start, zone, names in _SIDES:
        for nth, (name, column) in enumerate(names):
            left = start + SIDE_STEP * nth
            parts.append(_words(name, left + SIDE_BAR / 2, BOTTOM + 15))
            if row[column]:
                parts.append(_bar((left, left + SIDE_BAR), int(row[column]), y, total, name, zone))
    title = line(histogram.title)
    drawing = element(
        "svg",
        element("title", title),
        drawn_y(y, LEFT, WIDTH - 12, "elements (log)"),
        *parts,
        *_limits(fmt, x),
        *_exponents(shown, x),
        _words(histogram.x_title, (MIDDLE_X + RIGHT_X) / 2, BOTTOM + 34),
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        role="img",
    )
    return element("figure", element("figcaption", title), drawing, class_="bars")


def _bar(
    place: tuple[float, float], count: int, y: Axis, total: int, name: str, zone: str
) -> Markup:
    said = f"{name}: {count:,} of {total:,}, {percent(count / total)}, {_KINDS.get(zone, zone)}"
    top = y.place(count)
    return element(
        "rect", element("title", said), x=place[0], y=top, width=place[1] - place[0],
        height=BOTTOM - top, fill=ZONES[zone], stroke=OUTLINE, stroke_width=0.5,
    )  # fmt: skip


_KINDS = {"zero": "zero when recorded", "nonfinite": "not finite"}


def _zone(zone: str, first: int, end: int, x: Axis) -> Iterator[Markup]:
    """Its band above the plot, with its name where there is room."""
    if end <= first:
        return
    left, right = x.place(first), x.place(end)
    yield element(
        "rect", x=left, y=TOP - 14, width=right - left, height=8.0, fill=ZONES[zone],
        stroke=OUTLINE, stroke_width=0.5,
    )  # fmt: skip
    if right - left >= MIN_LABEL:
        yield _words(zone, (left + right) / 2, TOP - 19, "middle", "zone")


def _limits(fmt: NumberFormat, x: Axis) -> Iterator[Markup]:
    largest = f"{fmt.max:,.0f}" if fmt.max < 1e6 else f"{fmt.max:.1e}"
    subnormal, normal = fmt.min_subnormal_exponent, fmt.min_normal_exponent
    found = ((subnormal, "end", f"min subnormal 2^{subnormal} "),
             (normal, "start", f" min normal 2^{normal}"),
             (math.log2(fmt.max), "start", f" max {largest}"))  # fmt: skip
    for value, anchor, words in found:
        at = x.place(value)
        yield element("line", x1=at, x2=at, y1=TOP - 6, y2=BOTTOM, class_="limit")
        yield _words(words.strip(), at, TOP - 36, anchor)


def _exponents(shown: ExponentRange, x: Axis) -> Iterator[Markup]:
    every = max(4, 4 * math.ceil(shown.width / 48))
    for exponent in range(-(-shown.lowest // every) * every, shown.highest + 1, every):
        yield _words(f"2^{exponent}", x.place(exponent), BOTTOM + 15)


def _words(text: str, x: float, y: float, anchor: str = "middle", kind: str = "") -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor, class_=f"words {kind}".strip())
