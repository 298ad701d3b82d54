"""Names as text, against a CommonMark parser; numbers as a person reads them."""

from __future__ import annotations

import html
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from app import text
from tests.helpers import stores
from tests.helpers.hostile_texts import HOSTILE

PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
JOINER = "\u2060"
names = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp", "Zs")), max_size=60
)


def inline(markdown: str) -> list[tuple[str, str]]:
    """(type, content) of everything in one paragraph, text merged."""
    tokens = PARSER.parse(markdown)
    assert [t.type for t in tokens] == ["paragraph_open", "inline", "paragraph_close"], markdown
    merged: list[tuple[str, str]] = []
    for child in tokens[1].children or []:
        kind = "text" if child.type == "text_special" else child.type
        if merged and kind == merged[-1][0] == "text":
            merged[-1] = ("text", merged[-1][1] + child.content)
        else:
            merged.append((kind, child.content))
    return merged


@given(names.filter(bool))
def test_escaped_text_is_that_text_and_nothing_else(name: str) -> None:
    ((kind, content),) = inline(f"{text.escape(name)}")
    assert kind == "text"
    assert content.replace(JOINER, "") == name.replace(JOINER, "")


@given(names.filter(lambda n: n.strip()))
def test_code_is_one_code_span_with_that_content(name: str) -> None:
    ((kind, content),) = inline(text.code(name))
    assert (kind, content) == ("code_inline", name)


@pytest.mark.parametrize("name", [*stores.HOSTILE, ":red[x]", ":smile:", "$x$", "a -> b", "# h"])
def test_what_streamlit_replaces_in_parsed_text_is_parted(name: str) -> None:
    ((_, content),) = inline(text.escape(name))
    for replaced in (":red[", ":smile:", "->", "--", ">="):
        assert replaced not in content


# As mdast-util-gfm-autolink-literal looks for them, in the text that a parser has made.
WEB = re.compile(r"(https?://|www(?=\.))([-.\w]+)([^ \t\r\n]*)", re.IGNORECASE)
MAIL = re.compile(r"[-.\w+]+@[-\w]+(?:\.[-\w]+)+")


@pytest.mark.parametrize(
    "name",
    [*stores.HOSTILE, *HOSTILE, "www.evil.example", "WWW.evil.example/x", "a www.evil.example b",
     "someone@evil.example", "mailto:a@b.co", "https://evil.example", "HTTP://evil.example",
     "ftp://evil.example", "xmpp:a@b.co", "//evil.example", "a+b@sub.evil.example."],
)  # fmt: skip
def test_no_address_becomes_a_link(name: str) -> None:
    ((kind, content),) = inline(text.escape(name) or "x")
    assert kind == "text"
    assert not WEB.search(content)
    assert not MAIL.search(content)


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"), ("+1", "+1"), ("+A1", "'+A1"),
        ("-cmd|' /C calc'!A0", "'-cmd|' /C calc'!A0"),
        ("@SUM(A1)", "'@SUM(A1)"), ("\t=1", "'\t=1"), (" =1", "' =1"), ("layer.0", "layer.0"),
        (-1.5, -1.5), (None, None), ("", ""),
    ],
)  # fmt: skip
def test_a_cell_is_never_a_formula(cell: object, written: object) -> None:
    assert text.for_csv(cell) == written


@pytest.mark.parametrize("name", [*HOSTILE, "%{x}", "$\\alpha$", '<a href="x">y</a>'])
def test_plotly_reads_a_name_as_text(name: str) -> None:
    shown = text.for_plotly(name)
    assert "<" not in shown
    assert "%{" not in shown
    assert not re.fullmatch(r"\$.*\$", shown)
    assert html.unescape(shown).replace(JOINER, "") == text.bounded(name).replace(JOINER, "")


def test_newlines_do_not_start_a_block() -> None:
    ((kind, content),) = inline(text.escape("one\n\n# two\n- three"))
    assert (kind, content) == ("text", "one # two - three")


def test_plotly_gets_no_tag() -> None:
    assert text.for_plotly("<b>&</b>") == "&lt;b&gt;&amp;&lt;/b&gt;"


@given(st.text(max_size=300), st.integers(5, 80))
def test_cut_keeps_both_ends(name: str, length: int) -> None:
    short = text.cut(name, length)
    assert len(short) <= length
    if len(name) <= length:
        assert short == name
    else:
        tail = (length - 1) // 2
        assert short == name[: length - 1 - tail] + "…" + name[len(name) - tail :]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.share(1204, 4096), "1,204 of 4,096, 29.4 %"),
        (text.share(0, 0), "nothing to count"),
        (text.percent(0.0), "0.0 %"),
        (text.percent(1e-9), "under 0.1 %"),
        (text.percent(0.9999), "over 99.9 %"),
        (text.percent(math.nan), "no figure"),
        (text.power_of_two(65536.0), "2^16"),
        (text.power_of_two(2.0**-12), "2^-12"),
        (text.power_of_two(49152.0), "2^15.58"),
        (text.power_of_two(math.inf), "Inf"),
        (text.number(None), "not recorded"),
        (text.number(math.nan), "NaN"),
        (text.number(-math.inf), "-Inf"),
        (text.number(3.14159), "3.142"),
        (text.size(3 * 2**20), "3.0 MiB"),
        (text.size(None), "not recorded"),
        (text.duration(0.42), "420 ms"),
        (text.duration(8.4), "8.4 s"),
        (text.duration(200), "3 min 20 s"),
        (text.duration(7500), "2 h 5 min"),
        (text.ago(1000.0, now=1030.0), "just now"),
        (text.ago(1000.0, now=1000.0 + 7200), "2 h ago"),
        (text.plural(1, "step"), "1 step"),
        (text.plural(1200, "step"), "1,200 steps"),
        (text.plural(1, "entry", "entries"), "1 entry"),
        (text.plural(3, "entry", "entries"), "3 entries"),
    ],
)
def test_numbers(shown: str, expected: str) -> None:
    assert shown == expected
