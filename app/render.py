"""Blocks of a document on a page: tables, charts, boxes and folds as Streamlit's own elements.

Every text of a block is shown as text. What only a page has stands between the calls of
:func:`draw`: forms, buttons, and where a number's links lead (``beside``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope.story import document as doc
from app import chart
from app.figures.exponents import exponent_bars
from app.figures.training import DrawnCurve, control_losses
from app.text import cut, escape

METRIC_LENGTH = 24  # fits beside three other figures at 1,440 px, and on a phone
_WIDTHS = [11, 9]  # of a measurement and its four links at 1,440 px
# SVG's stroke-dasharray of a document, as Plotly names it.
_DASHES = {"": "solid", "9 6": "dash", "2 4": "dot", "9 4 2 4": "dashdot", "14 5": "longdash"}


def draw(
    blocks: Iterable[doc.Block],
    key: str,
    *,
    beside: Callable[[DeltaGenerator, doc.Measured], None] | None = None,
) -> None:
    """Draw the blocks one below the other. ``key`` begins the keys of what can be clicked.

    ``beside`` draws the links of a measurement into the place that it gets.
    """
    keys = itertools.chain([key], (f"{key}-{place}" for place in itertools.count(2)))
    for block in blocks:
        match block:
            case doc.Paragraph():
                _paragraph(block)
            case doc.Code():
                is_patch = block.language == "python" and "\n" in block.text.rstrip()
                st.code(block.text, language=block.language or None, wrap_lines=not is_patch)
            case doc.Table():
                table(block)
            case doc.Chain():
                _chain(block, next(keys))
            case doc.EvidenceBlock():
                _evidence(block, next(keys), beside)
            case doc.Facts():
                table(doc.Table(("What", "Value"), block.pairs))
            case doc.Figures():
                _figures(block.figures)
            case doc.Lines():
                _lines(block, next(keys))
            case doc.HistogramChart():
                st.markdown(f"**{escape(block.title)}**")
                figure = exponent_bars(block.row, block.fmt, 0, x_title=block.x_title)
                st.plotly_chart(figure, key=next(keys))
            case doc.Links():
                for link in block.links:
                    st.markdown(f"[{escape(link.text)}]({link.address})")
            case doc.Fold():
                with chart.details(escape(block.title)):
                    draw(block.blocks, f"{next(keys)}-in", beside=beside)


def table(block: doc.Table) -> None:
    """A table of texts; its first column names the rows."""
    escaped = tuple(tuple(map(escape, row)) for row in block.rows)
    frame = _frame(dataclasses.replace(block, rows=escaped))
    st.table(frame.set_index(block.columns[0]), border="horizontal")


def _frame(block: doc.Table) -> pd.DataFrame:
    return pd.DataFrame(block.rows, columns=list(block.columns))


def _paragraph(block: doc.Paragraph) -> None:
    lead = f"**{escape(block.lead)}** " if block.lead else ""
    (st.caption if block.is_quiet else st.markdown)(lead + escape(block.text))


def _figures(figures: Sequence[doc.Figure]) -> None:
    short = [dataclasses.replace(f, value=cut(f.value, METRIC_LENGTH)) for f in figures]
    chart.key_figures(short)


def _lines(block: doc.Lines, key: str) -> None:
    chart.show(curves(block), _file(key), lambda: values(block), key=key)


def curves(block: doc.Lines) -> go.Figure:
    """The chart of the curves."""
    drawn = [DrawnCurve(s.name, s.points, s.colour, _DASHES[s.dash]) for s in block.series]
    figure = control_losses(drawn, block.x_title)
    return figure.update_yaxes(row=1, col=1, title=block.y_title)


def values(block: doc.Lines) -> pd.DataFrame:
    """Every number of the chart, what is not finite as a text."""
    rows = []
    for s in block.series:
        found: dict[int, float | str] = dict.fromkeys(s.not_recorded, "not recorded")
        found |= dict(zip(s.points.steps, s.points.values, strict=True))
        found |= dict.fromkeys(s.points.nan_steps, "nan")
        found |= dict.fromkeys(s.points.pos_inf_steps, "inf")
        found |= dict.fromkeys(s.points.neg_inf_steps, "-inf")
        rows += [(s.name, s.run_id, n, str(found[n]), n in s.skipped) for n in sorted(found)]
    return pd.DataFrame(rows, columns=["control", "run", "step", block.y_title, "skipped"])


def _chain(block: doc.Chain, key: str) -> None:
    """A box for each link. Its key carries the colour of its left edge (states.STYLE): that of NaN
    and Inf, which its text names too, or that of the root."""
    with st.container(gap="xxsmall", key=key):
        for place, link in enumerate(block.links):
            if place:
                st.markdown(":gray[:material/arrow_downward:]")
            edge = "nonfinite" if link.is_nonfinite else "root" if link.is_root else "plain"
            with st.container(border=True, gap="xxsmall", key=f"{key}-{edge}-{place}"):
                st.markdown(f"**{escape(link.title)}**  \n{escape(link.detail)}")
    chart.download(lambda: _links_table(block.links), _file(key), key=key)


def _links_table(links: Sequence[doc.ChainLink]) -> pd.DataFrame:
    rows = [(place, link.title, link.detail, link.step) for place, link in enumerate(links, 1)]
    return pd.DataFrame(rows, columns=["place", "what", "detail", "step"])


def _evidence(
    block: doc.EvidenceBlock,
    key: str,
    beside: Callable[[DeltaGenerator, doc.Measured], None] | None,
) -> None:
    for m, row in zip(block.measured, block.table.rows, strict=True):
        said, links = st.columns(_WIDTHS, vertical_alignment="center")
        name, number, limit, run, step, _ = map(escape, row)
        where = f"{run}, step {step}" if step else run
        said.markdown(f"{name}: **{number}**{f', limit {limit}' if limit else ''} ({where})")
        if beside is not None:
            beside(links, m)
    chart.download(lambda: _raw(block.measured), _file(key), key=key)


def _raw(measured: Sequence[doc.Measured]) -> pd.DataFrame:
    """With every digit, as it was recorded."""
    rows = [
        (m.name, str(m.value), "" if m.limit is None else str(m.limit), m.control, m.step)
        for m in measured
    ]
    return pd.DataFrame(rows, columns=["measured", "value", "limit", "control", "step"])


def _file(key: str) -> str:
    """The name of its data's file."""
    return key.removeprefix("dx-")
