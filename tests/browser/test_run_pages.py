"""The run pages in a real Chromium: sliders, deep links, names that are markup, what is drawn."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from ampscope.records import Role
from ampscope.store.reader import Reader
from app.states import KEYS
from tests.helpers import browser, script_stores, stores
from tests.helpers.synthetic_run import add_step, module_paths

pytestmark = pytest.mark.browser

Start = Callable[..., str]


def opened(page: Any, url: str) -> None:
    """Go there and wait until everything is drawn."""
    page.goto(url)
    browser.settle(page)
    page.locator(".js-plotly-plot .main-svg").first.wait_for(state="visible")


def figure(page: Any, label: str) -> Any:
    """Where the value of the key figure with this label stands."""
    box = page.locator("[data-testid=stMetric]", has_text=label)
    return box.locator("[data-testid=stMetricValue]")


def test_the_loss_scale_slider_recounts(
    tmp_path: Path, dashboard: Start, browser_page: Any
) -> None:
    store = tmp_path / "runs.db"
    run = stores.finished(store)
    page = browser_page
    opened(page, f"{dashboard(store)}/gradients?run={run}&step=2")
    expect(figure(page, "Too small")).to_have_text("0")
    sentence = page.locator("h3", has_text="Step 2")
    expect(sentence).to_contain_text("as recorded, at the run's loss scale 2^16")

    slider = page.get_by_role("slider", name="Loss scale")
    assert slider.get_attribute("aria-valuetext") == "2^16"
    slider.focus()
    for _ in range(9):
        slider.press("ArrowLeft")
    page.locator("h3", has_text="as if the loss scale were 2^7").wait_for()
    expect(figure(page, "Too small")).to_have_text(re.compile(r"^[1-9][\d,]* \([\d.]+ %\)$"))
    expect(page).to_have_url(re.compile("scale=7"))

    page.get_by_role("button", name="Recorded").click()
    page.locator("h3", has_text="as recorded, at the run's loss scale 2^16").wait_for()
    expect(figure(page, "Too small")).to_have_text("0")
    expect(page).not_to_have_url(re.compile("scale="))


def test_a_deep_link_brings_the_view_back(
    tmp_path: Path, dashboard: Start, browser_page: Any, chromium: Any
) -> None:
    store = tmp_path / "runs.db"
    run = stores.finished(store)
    url = dashboard(store)
    asked = "step=8&module=h.1.mlp.up&role=weight_grad&scale=-3&format=bf16"
    opened(browser_page, f"{url}/gradients?run={run}&{asked}")
    words = "Step 8, weight gradients as if the loss scale were 2^-3 (recorded at 2^15)"
    browser_page.locator("h3", has_text=words).wait_for()
    address = browser_page.url
    with browser.page_of(chromium) as other:
        opened(other, address)
        other.locator("h3", has_text=words).wait_for()
        expect(other.get_by_text("h.1.mlp.up in bf16")).to_have_count(1)


def test_the_chart_has_limits_zones_and_every_module(
    tmp_path: Path, dashboard: Start, browser_page: Any
) -> None:
    store = tmp_path / "runs.db"
    run = stores.finished(store)
    opened(browser_page, f"{dashboard(store)}/gradients?run={run}&step=4")
    chart = browser_page.locator(".js-plotly-plot").first
    marks = ("min subnormal", "min normal", "max 65,504", "lost", "overflow", "NaN")
    for expected in (*marks, "h.0.attn.qkv", "h.1.mlp.down", "head"):
        expect(chart).to_contain_text(expected)
    chart.hover()
    with browser_page.expect_download() as picture:
        chart.locator(".modebar-btn").first.click()
    assert picture.value.suggested_filename == "histograms.svg"
    assert Path(picture.value.path()).read_text().startswith("<svg")
    with browser_page.expect_download() as data:
        browser_page.get_by_text("Data as CSV").first.click()
    with Reader(store) as reader:
        frame = reader.frame(run, Role.GRAD_OUTPUT, 4)
    assert frame is not None
    lines = Path(data.value.path()).read_text().splitlines()
    assert lines[0] == "step,module,magnitude,count"
    assert sum(int(line.rpartition(",")[2]) for line in lines[1:]) == int(frame.rows.sum())


def test_play_goes_through_the_steps(tmp_path: Path, dashboard: Start, browser_page: Any) -> None:
    store = tmp_path / "runs.db"
    run = stores.finished(store)
    page = browser_page
    opened(page, f"{dashboard(store)}/gradients?run={run}&step=8")
    page.get_by_role("button", name="Play").click()
    page.locator("h3", has_text="Step 11").wait_for()
    page.get_by_role("button", name="Play").wait_for()  # it stopped at the last step
    expect(page).to_have_url(re.compile("step=11"))


@pytest.mark.parametrize("name", ["layers", "gradients", "loss_scale"])
def test_names_from_a_run_are_never_markup(
    tmp_path: Path, dashboard: Start, browser_page: Any, name: str
) -> None:
    store = tmp_path / "runs.db"
    run = stores.hostile(store)
    opened(browser_page, f"{dashboard(store)}/{name}?run={run}")
    assert browser_page.evaluate("window.hacked") is None
    assert browser_page.locator("[data-testid=stMain] img[src='x']").count() == 0
    scripts = browser_page.locator("[data-testid=stMain] script").all_text_contents()
    assert all(text == KEYS.removeprefix("<script>").removesuffix("</script>") for text in scripts)


def test_skips_and_their_parameters(tmp_path: Path, dashboard: Start, browser_page: Any) -> None:
    store = tmp_path / "runs.db"
    run = stores.finished(store)
    page = browser_page
    opened(page, f"{dashboard(store)}/loss_scale?run={run}")
    page.locator("h3", has_text="1 skip in 12 steps, at step 4").wait_for()
    expect(page.locator(".js-plotly-plot").first).to_contain_text("skipped step")
    page.get_by_role("link", name="Step 4 on the Gradients page").click()
    page.locator("h3", has_text="Step 4, the first bad one recorded").wait_for()
    expect(figure(page, "Not finite")).not_to_have_text("0")


def test_a_table_offers_no_csv_of_its_own(
    tmp_path: Path, dashboard: Start, browser_page: Any
) -> None:
    """The browser would write its cells as they are, a spreadsheet's formulas too."""
    store = tmp_path / "runs.db"
    stores.finished(store)
    page = browser_page
    page.goto(f"{dashboard(store)}/op_lists")
    browser.settle(page)
    page.locator("[data-testid=stDataFrame]").first.hover()
    page.get_by_role("button", name="Search").first.wait_for(state="visible")
    assert page.locator("button[aria-label^='Download as CSV']").count()
    assert not page.locator("button[aria-label^='Download as CSV']:visible").count()


# Entries of the legend that a group of the tool bar's buttons lies on.
COVERED = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {
    const bars = [...plot.querySelectorAll('.modebar-group')].map(b => b.getBoundingClientRect());
    return [...plot.querySelectorAll('.legend .legendtext')].filter(text => {
        const a = text.getBoundingClientRect();
        return bars.some(b =>
            a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom);
    }).map(text => text.textContent);
})"""


def test_the_heat_map_keeps_its_width_on_a_phone_and_the_page_does_not_grow(
    tmp_path: Path, dashboard: Start, browser_page: Any
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    run = stores.finished(store)
    page.set_viewport_size({"width": 390, "height": 900})
    opened(page, f"{dashboard(store)}/gradients?run={run}")
    map_ = page.locator("[class*=st-key-wide-] .js-plotly-plot .main-svg").first
    expect(map_).to_be_visible()
    assert map_.bounding_box()["width"] >= 600
    wider = "() => { const m = document.querySelector('[data-testid=stMain]');"
    assert page.evaluate(wider + " return m.scrollWidth - m.clientWidth; }") <= 0


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("name", ["loss_scale", "diagnosis"])
def test_no_tool_bar_lies_on_a_legend(
    tmp_path: Path, dashboard: Start, browser_page: Any, name: str, width: int
) -> None:
    store = tmp_path / "runs.db"
    run = stores.finished(store) if name == "loss_scale" else script_stores.overflow(store)
    browser_page.set_viewport_size({"width": width, "height": 900})
    opened(browser_page, f"{dashboard(store)}/{name}?run={run}")
    browser_page.locator(".js-plotly-plot .legendtext").first.wait_for(state="visible")
    assert browser_page.locator(".js-plotly-plot .modebar-group").count()
    assert browser_page.evaluate(COVERED) == []


FOLLOWING_S = 30.0  # as long as a person watches a run that goes on
SLIDERS = """() => Object.fromEntries(
    [...document.querySelectorAll('[data-testid=stMain] input[type=range]')].map(
        slider => [slider.getAttribute('aria-label'), slider.getAttribute('aria-valuetext')]))"""


def test_widgets_keep_their_values_while_a_run_goes_on(
    tmp_path: Path, dashboard: Start, browser_page: Any
) -> None:
    """Steps come while the pages draw themselves, so that one drawing overtakes another. Each
    slider goes on showing what it showed first, and no choice appears in an address."""
    store = tmp_path / "runs.db"
    spec = replace(stores.SPEC, steps=1000)
    writer = stores._recorded(store, spec, module_paths(), 4)
    url = dashboard(store)
    tabs = {"gradients": browser_page}
    for name in ("layers", "loss_scale", "telemetry"):
        tabs[name] = browser_page.context.new_page()
    for name, tab in tabs.items():
        tab.goto(f"{url}/{name}?run={writer.run_id}", wait_until="commit")
    seen: dict[str, list[tuple[dict[str, str], dict[str, list[str]]]]] = {n: [] for n in tabs}
    step, drawn_at = 4, 0.0
    while not drawn_at or time.monotonic() - drawn_at < FOLLOWING_S:
        add_step(writer, module_paths(), step)
        writer.flush()
        step += 1
        time.sleep(0.7)
        for name, tab in tabs.items():
            seen[name].append((tab.evaluate(SLIDERS), parse_qs(urlsplit(tab.url).query)))
        if not drawn_at and seen["gradients"][-1][0] and seen["layers"][-1][0]:
            drawn_at = time.monotonic()
    for name, looks in seen.items():
        for label in {label for sliders, _ in looks for label in sliders}:
            shown = {sliders[label] for sliders, _ in looks if label in sliders}
            assert len(shown) == 1, (name, label, shown)
        for choice in ("scale", "window", "first", "last"):
            assert not any(choice in query for _, query in looks), (name, choice)
    scales = {sliders["Loss scale"] for sliders, _ in seen["gradients"] if sliders}
    assert scales == {"2^16"}
    writer.close()
