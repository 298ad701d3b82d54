"""The Training page in a real Chromium: it follows a run within seconds, by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampscope.records import Event
from tests.helpers import browser
from tests.helpers import watched_stores as watched

pytestmark = pytest.mark.browser

Start = Callable[..., str]
DELAY_S = 2.0
LOOKS = 5
SHOWN = "document.querySelector('[data-testid=stMetricValue]')?.innerText"


def seen_after_s(page: Any, writer: Any, number: int) -> float:
    """Seconds from the recording of a step to the moment at which the page shows it."""
    writer.add_step(watched.step(number))
    started = time.monotonic()
    while time.monotonic() - started < 30:
        writer.flush_if_due()  # as the watcher does at the end of every step
        if page.evaluate(SHOWN) == str(number):
            return time.monotonic() - started
        time.sleep(0.02)
    raise AssertionError(f"step {number} never came")


def stretch() -> float:
    """How many times longer the wall clock says a computation took than the processor: 1 on an idle
    machine, 2 where another process wants the same core."""
    started, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.1:
        pass
    return (time.monotonic() - started) / 0.1


def test_a_step_that_is_written_is_on_the_screen_within_seconds(
    tmp_path: Path, dashboard: Start, browser_page: Any
) -> None:
    store = tmp_path / "runs.db"
    writer = watched.begun(store, watched.good(50))
    browser_page.goto(f"{dashboard(store)}/training?run={writer.run_id}")
    browser.settle(browser_page)
    found, load = [], []
    for number in range(50, 50 + LOOKS):
        time.sleep(0.37)  # out of step with the page's clock
        found.append(seen_after_s(browser_page, writer, number))
        load.append(stretch())
    writer.close()
    # Medians, because a loaded test machine can stop a browser for seconds.
    allowed_s = DELAY_S * max(1.0, sorted(load)[LOOKS // 2])
    assert sorted(found)[LOOKS // 2] < allowed_s, (found, load)


def test_a_run_that_goes_bad_and_ends_is_told_without_a_click(
    tmp_path: Path, dashboard: Start, browser_page: Any
) -> None:
    store = tmp_path / "runs.db"
    writer = watched.begun(store, watched.good(50))
    page = browser_page
    page.goto(f"{dashboard(store)}/training?run={writer.run_id}")
    page.locator("h3", has_text="Healthy so far").wait_for()
    for number in range(50, 60):
        writer.add_step(watched.step(number, loss=float("nan")))
    writer.add_event(Event(50, "capsule", "c", "Kept: all.", path="/tmp/a b.safetensors"))
    writer.flush()
    page.locator("h3", has_text="Bad since step 50").wait_for()
    command = "ampscope replay '/tmp/a b.safetensors' --model file.py:build"
    assert page.locator("[data-testid=stCode]").first.inner_text().strip() == command
    watched.ended(writer)
    page.get_by_text("finished", exact=True).first.wait_for()
