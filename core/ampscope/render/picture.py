"""One chart of a report as a PNG, for programs that show pictures and no HTML.

It is the report's own drawing (:mod:`ampscope.render.html`) on white, with the title and the legend
drawn above it, rasterized by resvg (the extra ``mcp``)::

    found = charts(document(reader, ["1ff374f51ded"]))
    png = to_png(found[0])
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias

from ampscope.errors import BadInput
from ampscope.render import html
from ampscope.render.html import Markup, element
from ampscope.story import document as doc

Chart: TypeAlias = doc.Lines | doc.HistogramChart

ZOOM = 1.5  # 1,350 pixels wide: text of 18 pixels, which a model that scales to 1,000 still reads
MARGIN, TITLE_HEIGHT, LINE_HEIGHT = 12.0, 34.0, 20.0
LETTER = 7.0  # width of a letter at 12 pixels, on the wide side, to place the legend's entries
SAMPLE = 40.0  # a line of the legend with its gap
FONTS = "DejaVu Sans, Liberation Sans, Noto Sans, Arial, Helvetica, sans-serif"
# The rules of style.css that draw, in its light colours: resvg knows no variables.
STYLE = """
text { fill: #1b2330; font-size: 12px; }
.title { font-size: 16px; font-weight: bold; }
.subject { fill: #566171; }
.zone { font-weight: bold; }
.grid { stroke: #d4dae2; stroke-width: 1; }
.limit { stroke: #76808e; stroke-width: 1.5; stroke-dasharray: 5 4; }
.line { stroke-width: 2; stroke-linejoin: round; fill: none; }
.dots { stroke-width: 5; stroke-linecap: round; fill: none; }
.sign { stroke-width: 6; stroke-linecap: square; fill: none; }
.skip { stroke: #1b2330; stroke-width: 2; stroke-linecap: butt; }
"""


@dataclass(frozen=True, slots=True)
class NamedChart:
    """A chart of a report: where it stands, and what it shows."""

    part: str  # title of the part: the run's or diagnosis' sentence
    section: str
    chart: Chart


def charts(document: doc.Document) -> list[NamedChart]:
    """All charts in the order of the report."""
    return [
        NamedChart(part.title, section.title, chart)
        for part in document.parts
        for section in part.sections
        for chart in _charts(section.blocks)
    ]


def _charts(blocks: Sequence[doc.Block]) -> Iterator[Chart]:
    for block in blocks:
        if isinstance(block, doc.Lines | doc.HistogramChart):
            yield block
        elif isinstance(block, doc.Fold):
            yield from _charts(block.blocks)


def to_png(named: NamedChart) -> bytes:
    """The picture. Raises BadInput without resvg, without a font, and for a chart without data."""
    resvg = _resvg()
    if not _draws_text():
        raise BadInput(
            "This machine has no font to draw a chart's text with. Install one, for example "
            "fonts-dejavu-core, or read the numbers instead."
        )
    return _raster(resvg, to_svg(named))


def to_svg(named: NamedChart) -> str:
    """The picture before it is rasterized. Raises BadInput for a chart without data."""
    chart = named.chart
    legend, above = _legend(chart, TITLE_HEIGHT + LINE_HEIGHT)
    if isinstance(chart, doc.Lines):
        height = html.curves_height(chart)
        place = {"x": 0.0, "y": above, "width": html.WIDTH, "height": height}
        drawing = html.curves_drawing(chart, "chart", **place)
    else:
        height = html.HEIGHT
        drawing = html.bars_drawing(chart, x=0.0, y=above, width=html.WIDTH, height=height)
    if drawing is None:
        raise BadInput(f"{doc.line(chart.title)}: nothing was recorded, so there is no chart.")
    whole = above + height + MARGIN
    return element(
        "svg",
        element("rect", width=html.WIDTH, height=whole, fill="#ffffff"),
        element("text", doc.line(chart.title, 100), x=MARGIN, y=24.0, class_="title"),
        element("text", doc.line(named.part, 130), x=MARGIN, y=44.0, class_="subject"),
        *legend,
        drawing,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {html.WIDTH:.0f} {whole:.0f}",
        width=html.WIDTH,
        height=whole,
        font_family=FONTS,
    ).html


def _legend(chart: Chart, top: float) -> tuple[list[Markup], float]:
    """A sample and the name of each curve, in as many lines as they need; where the drawing
    begins below. One curve alone is named by its axis."""
    series = chart.series if isinstance(chart, doc.Lines) else ()
    if len(series) < 2:
        return [], top
    parts: list[Markup] = []
    x, y = MARGIN, top + LINE_HEIGHT / 2
    for one in series:
        name = doc.line(one.name, html.NAME_LENGTH)
        width = SAMPLE + LETTER * len(name) + 2 * MARGIN
        if x > MARGIN and x + width > html.WIDTH:
            x, y = MARGIN, y + LINE_HEIGHT
        dash = one.dash or None
        sample = element(
            "path",
            d=f"M{x:.6g} {y:.6g}h30",
            stroke=one.colour,
            stroke_dasharray=dash,
            class_="line",
        )
        parts += [sample, element("text", name, x=x + SAMPLE, y=y + 4)]
        x += width
    return parts, y + LINE_HEIGHT


def _resvg() -> ModuleType:
    try:
        import resvg_py
    except ImportError as error:
        raise BadInput("A PNG needs resvg. Install it with: pip install 'ampscope[mcp]'") from error
    return resvg_py


@functools.cache
def _draws_text() -> bool:
    """Whether a letter leaves a mark: without fonts resvg leaves text out and says nothing."""
    letter, blank = (
        element(
            "svg", element("text", text, x=2.0, y=16.0), xmlns="http://www.w3.org/2000/svg",
            viewBox="0 0 20 20", width=20.0, height=20.0, font_family=FONTS,
        ).html
        for text in ("M", " ")
    )  # fmt: skip
    return _raster(_resvg(), letter) != _raster(_resvg(), blank)


def _raster(resvg: ModuleType, svg: str) -> bytes:
    return bytes(
        resvg.svg_to_bytes(
            svg_string=svg, zoom=ZOOM, style_sheet=STYLE, sans_serif_family="DejaVu Sans"
        )
    )
