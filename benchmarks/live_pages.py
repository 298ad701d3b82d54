"""What it costs the server that browsers follow a running training: CPU of 0, 1 and 5 of them.

    python benchmarks/live_pages.py          # results/live_pages.json; about two minutes

A process writes 20 steps a second, flushed as `ampscope.watch` flushes them, into a run that has
10,000 steps already; Chromium pages show its Training page and follow it. CPU seconds per second
are those of the server's process. `bytes_a_tick` is what the server sends to one browser each time
the page moves on, by the steps that the run had before. `delay_s` is how long a step waits for the
screen at most: whenever the page moves on, the age of the oldest step that it had not shown until
then. All browsers draw on the same cores as the server, which is harder on them than life is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from classroom_browser import opened
from contest import setting

from ampscope.records import Machine, RunSpec, StepRecord
from ampscope.store.writer import RunWriter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' way of starting a dashboard and a Chromium

from tests.helpers import browser  # noqa: E402  - needs the path set above

RESULTS = ROOT / "benchmarks" / "results" / "live_pages.json"
BROWSERS = (0, 1, 5)
BEFORE, EVERY_S, WATCHED_S, LOOKS = 10_000, 0.05, 20.0, 30
TICK = 4_096  # bytes: a tick in which nothing has changed sends less
LENGTHS, TICKS = (1_000, 10_000, 100_000), 8
GOALS = {
    "median_s": 2.0,
    "largest_s": 3.0,
    "bytes_growth": 1.1,
}  # growth: longest over 10,000 steps
LAST_STEP = "[...document.querySelectorAll('[data-testid=stMetricValue]')].map(e => e.innerText)[0]"


class Training:
    """Writes steps in a thread and remembers when each was recorded."""

    def __init__(self, store: Path, before: int = BEFORE) -> None:
        self.recorded: dict[int, float] = {}
        self._writer = RunWriter.create(store, RunSpec("train.py", kind="watch", steps=0))
        self._writer.start(Machine("cpu", "benchmark", "native"))
        self._before = before
        for step in range(before):
            self._writer.add_step(StepRecord(step, loss=2.0, scale=1.0, step_time_s=0.05))
        self._writer.flush()
        self.run_id, self._ends = self._writer.run_id, threading.Event()
        self._thread = threading.Thread(target=self._write)

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        self._thread.start()
        yield
        self._ends.set()
        self._thread.join()
        self._writer.close()

    def _write(self) -> None:
        step = self._before
        while not self._ends.wait(EVERY_S):
            self.recorded[step] = time.monotonic()
            self._writer.add_step(StepRecord(step, loss=2.0, scale=1.0, step_time_s=0.05))
            self._writer.flush_if_due()
            step += 1


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = folder / "runs.db"
        training = Training(store)
        stack.enter_context(training.going())
        servers = stack.enter_context(browser.Servers(folder))
        chromium = stack.enter_context(browser.launched(browser.executable() or "chromium"))
        url = servers.start(store)
        pages: list[Any] = []
        cpu, delays = {}, {}
        for count in BROWSERS:
            while len(pages) < count:
                page = stack.enter_context(browser.page_of(chromium))
                page.goto(f"{url}/training?run={training.run_id}")
                browser.settle(page)
                pages.append(page)
            time.sleep(2.0)
            cpu[str(count)] = round(cpu_share(servers._running[0].pid, WATCHED_S), 3)
            if pages:
                delays[str(count)] = delays_of(pages[0], training)
    sizes = {str(length): bytes_a_tick(length) for length in LENGTHS}
    growth = sizes[str(LENGTHS[-1])] / sizes[str(BEFORE)]
    most = delays[str(BROWSERS[-1])]
    result = {
        "cpu_s_a_second": cpu,
        "delay_s": delays,
        "bytes_a_tick": sizes,
        "goals": GOALS,
        "goals_met": {
            "median_s": most["median"] <= GOALS["median_s"],
            "largest_s": most["largest"] <= GOALS["largest_s"],
            "bytes_growth": growth <= GOALS["bytes_growth"],
        },
        "setting": setting(),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def bytes_a_tick(length: int) -> int:
    """Median of what one session is sent whenever the page moves on."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        training = Training(folder / "runs.db", length)
        stack.enter_context(training.going())
        servers = stack.enter_context(browser.Servers(folder))
        return asyncio.run(_received(servers.start(folder / "runs.db"), training.run_id))


async def _received(url: str, run_id: str) -> int:
    tab = await opened(url)
    await tab.open("training", run=run_id)
    found: list[int] = []
    before = tab.received
    while len(found) < TICKS:
        await asyncio.sleep(0.05)
        if tab.received - before > TICK and not tab.is_busy:
            found.append(tab.received - before)
            before = tab.received
    await tab.close()
    if tab.errors:
        raise RuntimeError(f"the page failed: {tab.errors}")
    return int(np.median(found))


def cpu_share(pid: int, seconds: float) -> float:
    """CPU seconds a second of one process."""
    before, started = _cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_s(pid) - before) / (time.monotonic() - started)


def delays_of(page: Any, training: Training) -> dict[str, float]:
    """Median and largest of some updates of a page."""
    found = [delay(page, training) for _ in range(LOOKS)]
    return {"median": round(float(np.median(found)), 2), "largest": round(max(found), 2)}


def delay(page: Any, training: Training) -> float:
    """Waits until the page moves on; the age of the oldest step that it had not shown until then:
    the longest that any step of that update was waited for."""
    before = shown(page)
    while shown(page) == before:
        time.sleep(0.01)
    return time.monotonic() - training.recorded[before + 1]


def shown(page: Any) -> int:
    """The last step on the screen."""
    return int(page.evaluate(LAST_STEP).replace(",", ""))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
