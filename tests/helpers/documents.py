"""A document with every kind of block, each text of which can be found again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ampscope.analysis.training import finite_parts
from ampscope.numerics.formats import FORMATS
from ampscope.numerics.histogram import RAW_LEN
from ampscope.story import document as doc

HOSTILE = "<b>*bold*</b> [x](https://example.org)"
ADDRESS = "https://docs.pytorch.org/docs/stable/amp.html"


def marked(place: str) -> str:
    """A text that nothing else holds, and no escape changes."""
    return f"the{place.title().replace(' ', '')}here"


def every_block(text: Callable[[str], str]) -> tuple[doc.Block, ...]:
    """``text`` makes each text out of the name of its place."""
    series = doc.Series(
        text("curve"), finite_parts([0, 1, 2], [1.0, float("nan"), 0.5]), "#123456", "9 6"
    )
    root = doc.ChainLink(text("link"), text("link detail"), is_root=True)
    nan = doc.ChainLink("Loss", "NaN", is_nonfinite=True, step=3)
    row = np.arange(RAW_LEN, dtype=np.int64)
    blocks: tuple[doc.Block, ...] = (
        doc.Paragraph(text("paragraph"), text("lead")),
        doc.Paragraph(text("remark"), is_quiet=True),
        doc.Code(text("code"), "python"),
        doc.Table(("Name", "Value"), ((text("row"), text("cell")),)),
        doc.Chain((root, nan)),
        doc.EvidenceBlock((doc.Measured(text("measured"), 1.5, None, "fp32", 1_234, "abc"),)),
        doc.Facts(((text("fact"), text("fact value")),)),
        doc.Figures((doc.Figure(text("figure"), text("figure value"), text("figure note")),)),
        doc.Lines(text("curves"), "loss", (series,)),
        doc.HistogramChart(text("histogram"), row, FORMATS["fp16"]),
        doc.Links((doc.Link("PyTorch", ADDRESS),)),
    )
    assert {type(block) for block in blocks} | {doc.Fold} == set(doc.Block.__args__)
    return (*blocks, doc.Fold(text("fold"), blocks))


def texts(told: Any) -> Iterator[str]:
    """Every text of a block, a section or a document, in order."""
    if isinstance(told, str):
        yield told
    elif dataclasses.is_dataclass(told):
        for field in dataclasses.fields(told):
            yield from texts(getattr(told, field.name))
        if isinstance(told, doc.EvidenceBlock):  # and its numbers, as they are written
            yield from texts(tuple(row[1:] for row in told.table.rows))
    elif isinstance(told, tuple | list):
        for one in told:
            yield from texts(one)
