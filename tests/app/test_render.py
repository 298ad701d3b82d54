"""Every kind of block is drawn on a page, with its texts as texts and its keys its own."""

from __future__ import annotations

import math
import re
from typing import Any

from streamlit.testing.v1 import AppTest

from ampscope.analysis.training import finite_parts
from ampscope.story import document as doc
from app import render
from tests.helpers.documents import HOSTILE


def plain(text: str) -> str:
    """Without escapes of Markdown."""
    return re.sub(r"\\(?=[^\w\s])", "", text)


def every_block() -> None:
    from app import render
    from tests.helpers import documents

    render.draw(documents.every_block(lambda place: documents.HOSTILE), "all")


def test_every_block_is_drawn_and_no_text_becomes_markup() -> None:
    app: Any = AppTest.from_function(every_block, default_timeout=60).run()
    assert not app.exception, app.exception
    assert len(app.get("plotly_chart")) == 4
    assert [code.value for code in app.code] == [HOSTILE] * 2
    assert len(app.table) == 4  # of Table and Facts
    markdown = [m.value for kind in ("markdown", "caption") for m in app.get(kind)]
    markdown += [cell for table in app.table for cell in table.value.to_numpy().ravel()]
    markdown += [fold.label for fold in app.expander] + [figure.label for figure in app.metric]
    ours = "[PyTorch](https://docs.pytorch.org/docs/stable/amp.html)"
    assert markdown.count(ours) == 2
    for text in (text for text in markdown if text != ours):
        assert not re.search(r"(?<!\\)(?:\]\(|<b>)", text), text
    assert any("step 1,234" in plain(text) for text in markdown)


def test_the_values_of_a_chart_hold_every_step() -> None:
    losses = [1.0, None, math.nan, math.inf, 0.5]
    series = doc.Series(
        "fp32", finite_parts(range(5), losses), "#123456", skipped=(1, 2), not_recorded=(1,)
    )
    table = render.values(doc.Lines("Loss", "loss", (series,)))
    assert table["loss"].tolist() == ["1.0", "not recorded", "nan", "inf", "0.5"]
    assert table["skipped"].tolist() == [False, True, True, False, False]
