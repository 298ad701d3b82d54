"""Zoo and Diagnosis in Chromium with the real engine: from a button to a verdict to its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from ampscope.launcher import script_runs
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Frame, Role, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.zoo.answers import ANSWERS
from tests.helpers import script_stores, stores
from tests.helpers.browser import settle

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
RUN_MS = 300_000  # a diagnosis on a loaded machine; an idle one takes 10 s
Dashboard = Callable[..., str]
CASE = next(a for a in ANSWERS if a.id == "C01")


def test_a_case_of_the_zoo_is_diagnosed_traced_and_its_fix_run_again(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    url = dashboard(store)
    page.goto(f"{url}/zoo?case={CASE.id}")
    settle(page)
    page.get_by_role("button", name="Diagnose", exact=True).first.click()
    expect(page.get_by_text("Being diagnosed.").first).to_be_visible()
    found = page.get_by_text(
        re.compile(r"An activation overflowed \(AMP001\) in .* \(as expected\)")
    )
    expect(found).to_be_visible(timeout=RUN_MS)
    page.get_by_role("link", name="Open the diagnosis").click()
    page.wait_for_url(re.compile(r"/diagnosis\?.*run="))
    settle(page)
    verdict = re.compile(r"An activation overflowed \(AMP001\), in .* first at step 0")
    expect(page.get_by_text(verdict)).to_be_visible()
    expect(page.get_by_text("and the symptom was gone")).to_be_visible(timeout=RUN_MS)

    # The verdict's numbers lead to what was recorded.
    page.get_by_role("link", name="Measurements", exact=True).first.click()
    page.wait_for_url(re.compile(r"[?&]step=0"))
    expect(page.get_by_text(re.compile("Recorded at step 0.*1 optimizer step, "))).to_be_visible()
    page.get_by_role("link", name="Loss scale", exact=True).last.click()
    page.wait_for_url(re.compile(r"/loss_scale\?.*run="))
    settle(page)
    page.go_back()
    settle(page)

    # The fix runs again, as one more run of the same diagnosis.
    with Reader(store) as reader:
        before = reader.runs()
    button = page.get_by_role("button", name="Run the fix again")
    expect(button).to_be_enabled(timeout=RUN_MS)
    button.click()
    expect(page.get_by_text("The script is being run.")).to_be_visible()
    expect(page.get_by_text("The script is being run.")).to_be_hidden(timeout=RUN_MS)
    with Reader(store) as reader:
        after = reader.runs()
    assert len(after) == len(before) + 1
    newest = after[0]
    assert newest.spec.control == f"fp32_modules:{CASE.module}"
    assert newest.spec.group == before[0].spec.group
    assert newest.state is State.FINISHED
    again = re.compile("Run again just now.*and the symptom was gone")
    expect(page.get_by_text(again)).to_be_visible()


SLOW = """
import time, torch
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    (weight - 1).square().sum().backward()
    optimizer.step()
    time.sleep(5)
"""


def test_a_diagnosis_is_stopped(browser_page: Page, dashboard: Dashboard, tmp_path: Path) -> None:
    store, page = tmp_path / "runs.db", browser_page
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    url = dashboard(store)
    job = script_runs.start_diagnosis(script, store)
    try:
        page.goto(f"{url}/diagnosis")
        settle(page)
        while page.get_by_role("button", name="Stop").count() == 0:
            page.wait_for_timeout(1000)
            page.reload()
            settle(page)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("It is being stopped")).to_be_visible()
        expect(page.get_by_text("Under way:")).to_be_hidden(timeout=RUN_MS)
        expect(page.get_by_text("Nothing is known yet.")).to_be_visible()
    finally:
        script_runs.stop(job)
    with Reader(store) as reader:
        assert {run.state for run in reader.runs()} == {State.CANCELLED}


def test_names_from_a_script_are_text(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    op = script_stores.bad_op(stores.HOSTILE[0], stores.HOSTILE[1], stores.HOSTILE[2])
    run = script_stores.overflow(store, op=op)
    page.goto(f"{dashboard(store)}/diagnosis?run={run}&step=0")
    settle(page)
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    expect(page.get_by_text("<script>window.hacked=1").first).to_be_visible()
    assert page.evaluate("window.hacked") is None
    assert page.locator("[data-testid=stMain] img[src='x']").count() == 0
    assert page.locator("[data-testid=stMain] a[href^='javascript']").count() == 0


@pytest.mark.parametrize("width", [1400, 800])
def test_nothing_is_wider_than_the_page(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path, width: int
) -> None:
    store, page = tmp_path / "runs.db", browser_page
    run = script_stores.overflow(store)
    page.set_viewport_size({"width": width, "height": 1000})
    page.goto(f"{dashboard(store)}/diagnosis?run={run}&step=0")
    settle(page)
    expect(page.get_by_text("Recorded at step 0")).to_be_visible()
    wider = page.evaluate(
        "(() => { const m = document.querySelector('[data-testid=stMain]');"
        " return m.scrollWidth - m.clientWidth; })()"
    )
    assert wider <= 0


def test_evidence_and_chain_use_the_width_of_the_page(
    browser_page: Page, dashboard: Dashboard, tmp_path: Path
) -> None:
    """Four links of a row beside each other; the chain's text in as few lines as fit."""
    store, page = tmp_path / "runs.db", browser_page
    run = script_stores.overflow(store)
    writer = RunWriter(store, run)  # what the pages Layers and Gradients are of
    writer.add_modules([stores.module(0, "encoder")])
    empty = np.zeros((1, RAW_LEN), np.int64)
    writer.add_frame(Frame(0, Role.WEIGHT, (0,), ("fp32",), empty))
    writer.close()
    page.set_viewport_size({"width": 1440, "height": 1000})
    page.goto(f"{dashboard(store)}/diagnosis?run={run}")
    settle(page)
    # The last of each name, at one moment, until the page has come to rest: charts that are still
    # to be drawn move what is below them, and are drawn anew with their links.
    beside = """names => {
        const links = [...document.querySelectorAll("a")];
        const last = name => links.filter(e => e.textContent.trim() === name).at(-1);
        const tops = names.map(name => last(name)?.getBoundingClientRect().top);
        return tops[0] > 0 && tops.every(top => Math.abs(top - tops[0]) < 2);
    }"""
    names = ["Measurements", "Gradients", "Loss scale", "Layers"]
    page.wait_for_function(beside, arg=names)
    first = page.get_by_text("fp32 gives 234,280; fp16 ends at 65,504")
    lines = "e => e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).lineHeight)"
    assert first.evaluate(lines) < 2.5  # its title and one line
    page.set_viewport_size({"width": 390, "height": 900})
    expect(first).to_be_visible()
    assert first.evaluate(lines) > 2.5  # it wraps
    edge = "e => getComputedStyle(e.closest('[class*=st-key-dx-chain-]')).borderLeftColor"
    assert first.evaluate(edge) == "rgb(213, 94, 0)"  # that of NaN and Inf
