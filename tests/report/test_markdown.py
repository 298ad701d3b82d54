"""Reports as Markdown: an independent parser sees nothing but text in what came from a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from ampscope.records import State
from ampscope.render.markdown import JOINER, escaped, fenced, to_markdown
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.story.build import document
from ampscope.story.document import line
from tests.helpers import script_stores, stores
from tests.helpers.hostile_texts import HOSTILE

MARKS = st.sampled_from(
    [*"\\`*_[]<>|~&$!{}#+-=.:()@/ \"'1aW", "://", "www.", "\n", "```", "\u202e"]
)
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
# What GitHub looks for in parsed text (docs.github.com, "Autolinked references and URLs").
REFERENCE = re.compile(r"@\w|#\d|GH-\d|https?://|www\.", re.IGNORECASE)


def inline(tokens: list[Token]) -> list[Token]:
    return [part for token in tokens for part in (token.children or [])]


@given(st.lists(MARKS, max_size=14).map("".join))
def test_prose_is_text_and_nothing_else(text: str) -> None:
    tokens = PARSER.parse(f"before\n\n{escaped(text)}\n\nafter")
    assert {t.type for t in tokens} <= {"paragraph_open", "inline", "paragraph_close"}
    assert {t.type for t in inline(tokens)} <= {"text", "text_special"}
    middle = "".join(t.content for t in inline(tokens))[len("before") : -len("after")]
    assert middle.replace(JOINER, "") == line(text)
    assert not REFERENCE.search(middle)


@given(st.lists(MARKS, max_size=14).map("".join))
def test_a_cell_stays_one_cell(text: str) -> None:
    tokens = PARSER.parse(f"| a | b |\n| --- | --- |\n| {escaped(text) or ' '} | last |")
    assert sum(t.type == "td_open" for t in tokens) == 2
    assert {t.type for t in inline(tokens)} <= {"text", "text_special"}
    assert inline(tokens)[-1].content == "last"


@given(st.lists(MARKS, max_size=20).map("".join))
def test_a_fence_holds_its_code(text: str) -> None:
    tokens = PARSER.parse(f"{fenced(text, 'python')}\n\nafter")
    assert [t.type for t in tokens] == ["fence", "paragraph_open", "inline", "paragraph_close"]


@pytest.mark.parametrize("text", HOSTILE)
def test_of_hostile_runs(tmp_path: Path, text: str) -> None:
    store = tmp_path / "runs.db"
    head = script_stores.overflow(store, op=script_stores.bad_op(text, text, text))
    with Reader(store) as reader:
        made = to_markdown(document(reader, [head]))
    tokens = PARSER.parse(made)
    html = [t.content for t in [*tokens, *inline(tokens)] if t.type.startswith("html")]
    ours = re.compile(r"\s*(<details><summary>[\w ,]+</summary>|</details>)\s*")
    assert all(ours.fullmatch(h) for h in html)
    links = [t.attrs["href"] for t in inline(tokens) if t.type == "link_open"]
    assert all(str(link).startswith("https://docs.pytorch.org/") for link in links)
    assert not [t for t in inline(tokens) if t.type == "image"]
    prose = [t.content for t in inline(tokens) if t.type == "text"]
    named = "PyTorch: automatic mixed precision"  # the text of one of our own links
    assert not [p for p in prose if REFERENCE.search(p) and p != named]


def test_says_verdict_patch_and_table(tmp_path: Path) -> None:
    head = script_stores.overflow(tmp_path / "runs.db")
    with Reader(tmp_path / "runs.db") as reader:
        made = to_markdown(document(reader, [head]))
    assert made.startswith(
        "# Root cause: An activation overflowed (AMP001), in encoder.2.wo, first at step"
    )
    assert "```python\nimport torch\n" in made
    assert "| infinities | 60 |" in made or "234,280" in made
    assert len(made) < 65_536  # characters that an issue of GitHub holds


@pytest.mark.parametrize("frame", ["  File x.py, line 3\n", "\U000e0001", "`" * 9 + "\n"])
def test_the_whole_fits_into_an_issue(tmp_path: Path, frame: str) -> None:
    """Eight failed runs with long tracebacks, of characters that take ten when spelled out."""
    store = tmp_path / "runs.db"
    runs = []
    for _ in range(8):
        writer = RunWriter.create(store, stores.SPEC)
        writer.start(stores.MACHINE)
        writer.finish(State.FAILED, "It failed.", f"first {frame * (60_000 // len(frame))} last")
        writer.close()
        runs.append(writer.run_id)
    with Reader(store) as reader:
        made = to_markdown(document(reader, runs))
    assert len(made) <= 65_536  # what an issue of GitHub holds
    assert "The HTML report has everything" in made
    assert ("Left out: " in made) == (frame == "\U000e0001")
    assert "… " in made  # each traceback says how much of it is cut
    PARSER.parse(made)


def test_of_very_many_runs_what_is_left_out_is_said(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    runs = [stores.queued(store) for _ in range(120)]
    with Reader(store) as reader:
        made = to_markdown(document(reader, runs))
    assert len(made) <= 65_536
    (said,) = re.findall(r"Left out: (.*?)\. Long code", made)
    titles = re.search(r"Titles \((\d+)\)", said.replace("\\", ""))
    assert titles is not None
    headings = len([t for t in PARSER.parse(made) if t.type == "heading_open" and t.tag == "h1"])
    assert headings + int(titles[1]) == 120
    assert "What is missing" in said
