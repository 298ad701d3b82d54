"""Every renderer writes out every text of a document, once for each time that it stands there.
What a document says is tested by itself; a renderer adds nothing and leaves nothing out."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from streamlit.testing.v1 import AppTest

from ampscope.render.html import to_html
from ampscope.render.markdown import to_markdown
from ampscope.render.terminal import print_sections
from ampscope.story import document as doc
from tests.helpers.documents import every_block, marked, texts

DOCUMENT = doc.Document(
    (doc.Part(marked("title"), marked("subject"), (doc.Section("Section", every_block(marked)),)),),
    made=marked("made"),
)
ALL = [text for text in texts(DOCUMENT) if re.fullmatch(r"the\w+here", text)]


def in_html() -> str:
    return html.unescape(re.sub(r"<(style|script).*?</\1>", "", to_html(DOCUMENT), flags=re.S))


def in_the_terminal() -> str:
    out = io.StringIO()
    print_sections(DOCUMENT.parts[0].sections, Console(file=out, width=400))
    return out.getvalue()


def drawn() -> None:
    from app import render
    from tests.helpers.documents import every_block, marked

    render.draw(every_block(marked), "all")


def on_a_page() -> str:
    app: Any = AppTest.from_function(drawn, default_timeout=60).run()
    assert not app.exception, app.exception
    parts = [e.value for kind in ("markdown", "caption", "code") for e in app.get(kind)]
    parts += [e.label for e in app.expander]
    parts += [f"{m.label} {m.value} {m.help}" for m in app.metric]
    parts += [table.value.reset_index().to_csv(sep=" ") for table in app.table]
    parts += [chart.proto.spec for chart in app.get("plotly_chart")]
    return "\n".join(parts)


# What a renderer has no room for: a terminal draws no curve, and a page's head is its own.
HEAD = {marked("title"), marked("subject"), marked("made")}


@pytest.mark.parametrize(
    ("written", "without"),
    [
        (in_html, set()),
        (lambda: to_markdown(DOCUMENT), set()),
        (in_the_terminal, {*HEAD, marked("curve")}),
        (on_a_page, {*HEAD, marked("curves")}),  # the section's own title stands over the chart
    ],
    ids=["HTML", "Markdown", "terminal", "page"],
)
def test_nothing_is_left_out(written: Callable[[], str], without: set[str]) -> None:
    text, wanted = written(), [one for one in ALL if one not in without]
    short = [one for one in wanted if text.count(one) < wanted.count(one)]
    assert short == []


def test_a_terminal_says_where_a_chart_is() -> None:
    assert f"{marked('curves')}: a chart of the dashboard" in in_the_terminal()
