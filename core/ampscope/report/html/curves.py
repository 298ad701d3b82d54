"""Curves over steps as a drawing that is whole without a script. script.js adds a read-out, zoom
and switches for the curves, by moving what is drawn here.

Values that are not finite, and steps that GradScaler left out, have rows of their own below the
plot, so that none is dropped. All lines keep their width when they are stretched; dots are lines of
no length with round ends, so they stay round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ampscope.report.colours import NONFINITE
from ampscope.report.document import Lines, Series
from ampscope.report.html.axes import (
    LEFT,
    RIGHT,
    WIDTH,
    Axis,
    drawn_x,
    drawn_y,
    steps_axis,
    values_axis,
)
from ampscope.report.html.element import Markup, data, element
from ampscope.report.plain import line

TOP, BOTTOM = 10.0, 250.0
ROW, FOOT = 30.0, 42.0
FEW_POINTS = 60  # so few have dots
NAME_LENGTH = 60
DIGITS = 6


@dataclass(frozen=True, slots=True)
class Row:
    """Steps below the plot: of what, and the sign that stands for each."""

    name: str
    steps: tuple[int, ...]
    sign: str  # SVG path commands after "M x y"
    is_nonfinite: bool


def curves(lines: Lines, identifier: str) -> Markup:
    """A figure with its legend, its drawing and its data."""
    rows = [row for series in lines.series for row in _rows(series)]
    steps = [s for series in lines.series for s in series.points.steps]
    steps += [s for row in rows for s in row.steps]
    if not steps:
        return element("p", f"{lines.title}: nothing was recorded.")
    x = steps_axis(steps)
    values = [v for series in lines.series for v in series.points.values]
    y = values_axis(values, lines.base, TOP, BOTTOM)
    height = BOTTOM + ROW * len(rows) + FOOT
    drawing = element(
        "svg",
        element("title", line(lines.title)),
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
    )
    return element(
        "figure",
        element("figcaption", line(lines.title)),
        _legend(lines),
        drawing,
        data(f"{identifier}-data", _numbers(lines, rows, x, y)),
        class_="lines",
        data_chart=identifier,
    )


def _rows(series: Series) -> Iterator[Row]:
    points, name = series.points, line(series.name, NAME_LENGTH)
    kinds = (("NaN", points.nan_steps, "h0"), ("+Inf", points.pos_inf_steps, "v-9"),
             ("−Inf", points.neg_inf_steps, "v9"))  # fmt: skip
    for kind, steps, sign in kinds:
        if steps:
            yield Row(f"{name}: {kind}", steps, sign, True)
    if series.skipped:
        yield Row(f"{name}: step skipped", series.skipped, "m0 -5v10", False)


def _clip(identifier: str, height: float, top: float) -> Markup:
    box = element("rect", x=LEFT, y=top, width=WIDTH - LEFT - RIGHT, height=height)
    return element("clipPath", box, id=f"{identifier}-clip")


def _curve(number: int, series: Series, x: Axis, y: Axis) -> Markup:
    path = _path(series, x, y)
    look = {"stroke": series.colour, "fill": "none"}
    dots = None
    if len(series.points.steps) <= FEW_POINTS and not series.is_stepped:
        places = _places(series, x, y)
        dots = element(
            "path", d="".join(f"M{a} {b}h0" for _, a, b in places), class_="dots", **look
        )
    drawn = element("path", d=path, stroke_dasharray=series.dash or None, class_="line", **look)
    return element("g", drawn, dots, data_s=str(number))


def _path(series: Series, x: Axis, y: Axis) -> str:
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


def _places(series: Series, x: Axis, y: Axis) -> Iterator[tuple[int, str, str]]:
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


def _legend(lines: Lines) -> Markup:
    keys = []
    for number, series in enumerate(lines.series):
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
        name = line(series.name, NAME_LENGTH)
        keys.append(element("span", sample, name, class_="entry", data_s=str(number)))
    return element("p", *keys, class_="legend")


def _numbers(lines: Lines, rows: list[Row], x: Axis, y: Axis) -> dict[str, object]:
    """What the script reads; places in the drawing follow from the axes."""
    return {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end, y.base],
        "series": [
            {
                "name": line(s.name, NAME_LENGTH),
                "x": s.points.steps,
                "y": [float(f"{v:.{DIGITS}g}") for v in s.points.values],
            }
            for s in lines.series
        ],
        "rows": [{"name": row.name, "x": row.steps} for row in rows],
    }
