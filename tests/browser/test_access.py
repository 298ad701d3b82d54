"""Without a mouse, and for weak eyes: keys, the way of the focus, and axe-core's rules of WCAG."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from ampscope.records import RunSpec
from app.links import ENTRIES
from tests.helpers import stores
from tests.helpers.browser import page_of, settle

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
Dashboard = Callable[..., str]
AXE = (files("axe_playwright_python") / "axe.min.js").read_text()
RUN = """() => axe.run(document, {runOnly: {type: "tag",
    values: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}})"""
MENDED = """() => document.querySelector("[data-testid=stSidebarNavItems][role]") !== null
    && document.querySelector("[data-testid=stSidebarNavItems] li:not([role])") === null"""
IN_SIDEBAR = "() => document.activeElement.closest('[data-testid=stSidebar]') !== null"
FOCUSED = """() => { const style = getComputedStyle(document.activeElement);
    return style.outlineStyle !== "none" || style.boxShadow !== "none"
        || document.activeElement.matches("input"); }"""  # an input's frame changes its colour
SIDEBAR_TABS = 12
IN_ORDER = [
    "Home", "Diagnosis", "Runs", "New probe", "Compare", "Hardware", "Learn", "Zoo", "Op lists",
]  # fmt: skip


@pytest.mark.quick("light-some")
@pytest.mark.parametrize("which", ["some", "every"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(
    chromium: Browser, dashboard: Dashboard, tmp_path: Path, scheme: str, which: str
) -> None:
    store = tmp_path / "runs.db"
    first = stores.finished(store, RunSpec(workload="gpt", precision="fp16", steps=4))
    second = stores.finished(store, RunSpec(workload="gpt", precision="fp32", steps=4))
    every = [entry.name for entry in ENTRIES if entry.name != "home"]
    pages = ["", *every] if which == "every" else ["", "gradients"]
    url, found = dashboard(store), []
    with page_of(chromium, scheme=scheme) as page:
        for name in pages:
            page.goto(f"{url}/{name}?run={first}&second={second}")
            settle(page)
            page.wait_for_function(MENDED)
            page.evaluate(AXE)
            broken = page.evaluate(RUN)["violations"]
            found += [(name, one["id"], one["nodes"][0]["html"][:200]) for one in broken]
    assert not found


def test_tab_leads_through_the_sidebar_and_the_focus_is_seen(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    run = stores.finished(store, RunSpec(workload="gpt", steps=4))
    page.goto(f"{dashboard(store)}/gradients?run={run}")
    settle(page)
    entries = page.locator("a[data-testid=stSidebarNavLink]").all_inner_texts()
    assert [entry.split("\n")[-1] for entry in entries] == IN_ORDER  # the icon's name stands first
    page.keyboard.press("Tab")  # "Skip to main content"
    inside = 0
    for _ in range(2 * SIDEBAR_TABS):
        page.keyboard.press("Tab")
        if not page.evaluate(IN_SIDEBAR):
            break
        inside += 1
        assert page.evaluate(FOCUSED), page.evaluate("() => document.activeElement.outerHTML")
    assert 5 < inside <= SIDEBAR_TABS


def test_keys_open_pages_find_and_step(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    run = stores.finished(store, RunSpec(workload="gpt", steps=6))
    page.goto(f"{dashboard(store)}/gradients?run={run}")
    settle(page)
    slider = page.get_by_role("slider", name="Step")
    last = int(slider.input_value())
    page.keyboard.press("ArrowLeft")
    expect(slider).to_have_value(str(last - 1))
    page.wait_for_url(re.compile(r"step="))
    page.keyboard.press("ArrowLeft")
    expect(slider).to_have_value(str(last - 2))

    page.keyboard.press("g")
    page.keyboard.press("h")
    expect(page.get_by_role("heading", name="Home", exact=True)).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    find = page.get_by_role("textbox", name="Find")
    expect(find).to_be_focused()
    page.keyboard.type("gh/")  # a key that is text is text
    expect(find).to_have_value("gh/")
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
