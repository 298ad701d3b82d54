"""The pages of a probe, a watched training and a diagnosed script of 500 modules x 1,000 steps, and
Home and Runs over 2,000 runs: the server's time, the time to the last chart in Chromium, and the
server's memory after 500 page loads.

    python benchmarks/page_time.py            # results/page_time.json; about twelve minutes

`pages_s` is Streamlit's own test runner through app/main.py: the script's time plus the building of
messages, without the network and the browser. `first` is a new session on empty caches, `again` the
same session once more, the others what a user moves or asks for there. Each is [wall, CPU] seconds:
on a machine that does something else too, the second is what the page takes.

`chromium_s` is from the address to the last chart, in a new browser session on a server that has
drawn the page once; `picture_s` from a key on a slider to the new picture. Both on the same cores
as the server. `memory` is the resident memory of the server's process, after a first round of pages
that fills the caches, and after 500 more loads, each a session of its own that is closed again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import psutil
from classroom_browser import opened
from contest import setting
from large_run import write_diagnosis, write_run, write_watched

from ampscope.records import Machine, Role, RunSpec, State, StepRecord
from ampscope.store.writer import RunWriter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' way of starting a dashboard and a Chromium

from tests.helpers import browser  # noqa: E402  - needs the path set above

RESULTS = ROOT / "benchmarks" / "results" / "page_time.json"
GOALS = {
    "page_s": 0.5,
    "chromium_s": 2.5,
    "slider_s": 0.15,
    "picture_s": 0.5,
    "memory_growth_mib": 50.0,
    "store_mib": 300.0,
}
PAGES = ("layers", "gradients", "loss_scale", "two_runs", "telemetry")  # of the probe
OF_SCRIPT, OF_WATCHED = ("diagnosis", "source"), ("training",)
SLIDERS = ("slider", "step")  # of the Gradients page
LOADS, LOOKS = 500, 9
WAIT_MS = 180_000  # on a machine that does something else too
IS_DRAWN = """() => document.querySelector('[data-testid=stMain] h1') !== null
    && document.querySelector('[data-test-script-state=notRunning]') !== null
    && document.querySelector('[data-testid=stMain] [data-testid=stSkeleton],'
        + '.js-plotly-plot:not(:has(.main-svg))') === null"""
# Plotly gives a chart that is drawn anew new data.
KEEP = "() => { window.before = document.querySelector('.js-plotly-plot').data; }"
IS_NEW = "() => document.querySelector('.js-plotly-plot').data !== window.before"
Queries = dict[str, dict[str, str]]  # of the addresses of pages
OF_ALL = ("home", "runs")  # pages of the whole store


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--modules", type=int, default=500)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--runs", type=int, default=2000)
    arguments.add_argument("--loads", type=int, default=LOADS)
    arguments.add_argument("--looks", type=int, default=LOOKS, help="of Chromium at each page")
    arguments.add_argument("--out", type=Path, default=RESULTS)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        run = write_run(store, given.modules, given.steps)
        weight = size_mib(store)
        second = write_run(store, given.modules, given.steps)
        queries = {page: {"run": run, "second": second} for page in PAGES}
        script = write_diagnosis(store, given.modules, given.steps)
        queries |= {page: {"run": script} for page in OF_SCRIPT}
        watched = write_watched(store, given.modules, given.steps)
        queries |= {page: {"run": watched} for page in OF_WATCHED}
        pages = {
            page: measure(store, page, given.rounds, **query) for page, query in queries.items()
        }
        many = Path(folder) / "many.db"
        write_many(many, given.runs)
        pages |= {page: measure(many, page, given.rounds) for page in OF_ALL}
        chromium = in_chromium(store, queries, many, Path(folder), given.looks)
        memory = asyncio.run(after_loads(store, queries, Path(folder), given.loads))
        result = {
            "run": {"modules": given.modules, "steps": given.steps, "roles": len(Role)},
            "runs_of_home": given.runs,
            "store_mib": round(weight, 1),
            "goals": GOALS,
            "goals_met": {
                "page_s": worst(pages, ("first", "again")) <= GOALS["page_s"],
                "chromium_s": max(chromium["chromium_s"].values()) <= GOALS["chromium_s"],
                "slider_s": worst(pages, SLIDERS) <= GOALS["slider_s"],
                "picture_s": max(chromium["picture_s"].values()) <= GOALS["picture_s"],
                "memory_growth_mib": memory["growth_mib"] < GOALS["memory_growth_mib"],
                "store_mib": weight <= GOALS["store_mib"],
            },
            "pages_s": pages,
            **chromium,
            "memory": memory,
            "setting": setting(),
        }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def worst(pages: dict[str, dict[str, list[float]]], names: tuple[str, ...]) -> float:
    """Of the processor times, in seconds."""
    return max(found[name][1] for found in pages.values() for name in names if name in found)


def in_chromium(
    store: Path, queries: Queries, many: Path, folder: Path, looks: int
) -> dict[str, dict[str, float]]:
    """Medians in seconds: each page to its last chart, in a new browser session and opened again
    in it; each slider to its new picture."""
    pages, again, pictures = {}, {}, {}
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(browser.Servers(folder))
        running = stack.enter_context(browser.launched(browser.executable() or "chromium"))
        large, whole = servers.start(store), servers.start(many)
        addresses = {page: f"{large}/{page}?{urlencode(q)}" for page, q in queries.items()}
        addresses |= {page: f"{whole}/{'' if page == 'home' else page}" for page in OF_ALL}
        for name, address in addresses.items():
            times: dict[str, list[float]] = {"new": [], "again": []}
            for _ in range(looks + 1):  # the first reads the store
                with browser.page_of(running) as page:
                    for found in times.values():
                        started = time.perf_counter()
                        page.goto(address)
                        page.wait_for_function(IS_DRAWN, timeout=WAIT_MS)
                        found.append(time.perf_counter() - started)
            pages[name] = round(float(np.median(times["new"][1:])), 2)
            again[name] = round(float(np.median(times["again"][1:])), 2)
        with browser.page_of(running) as page:
            page.goto(addresses["gradients"])
            page.wait_for_function(IS_DRAWN, timeout=WAIT_MS)
            for name, label in (("slider", "Loss scale"), ("step", "Step")):
                pictures[name] = round(float(np.median(moves(page, label, looks))), 2)
    return {"chromium_s": pages, "chromium_again_s": again, "picture_s": pictures}


def moves(page: Any, label: str, looks: int) -> list[float]:
    """From a key on a slider to the new picture, again and again."""
    slider, found = page.get_by_role("slider", name=label), []
    slider.focus()
    for _ in range(looks):
        page.evaluate(KEEP)
        started = time.perf_counter()
        slider.press("ArrowLeft")
        page.wait_for_function(IS_NEW, timeout=WAIT_MS)
        found.append(time.perf_counter() - started)
        page.wait_for_function(IS_DRAWN, timeout=WAIT_MS)
    return found


async def after_loads(store: Path, queries: Queries, folder: Path, loads: int) -> dict[str, float]:
    """The server's memory before and after ``loads`` sessions, in MiB."""
    pages = [*((page, {}) for page in OF_ALL), *queries.items()]
    with browser.Servers(folder) as servers:
        url = servers.start(store)
        process = psutil.Process(servers._running[0].pid)
        for turn in range(5 * len(pages)):
            page, query = pages[turn % len(pages)]
            await load(url, page, **query)
        before = process.memory_info().rss / 2**20
        for turn in range(loads):
            page, query = pages[turn % len(pages)]
            await load(url, page, **query)
        after = process.memory_info().rss / 2**20
    return {
        "loads": loads,
        "before_mib": round(before, 1),
        "after_mib": round(after, 1),
        "growth_mib": round(after - before, 1),
    }


async def load(url: str, page: str, **query: str) -> None:
    """One session that opens a page, and leaves. The first run of a session is its home page's."""
    tab = await opened(url)
    await tab.open("" if page == "home" else page, **query)
    await tab.close()
    if tab.errors:
        raise RuntimeError(f"the page {page} failed: {tab.errors}")


def write_many(store: Path, runs: int) -> None:
    """Finished probes of three steps, three to a group."""
    for number in range(runs):
        precision = ("fp16", "bf16", "fp32")[number % 3]
        spec = RunSpec("gpt", precision=precision, steps=3, group=f"g{number // 3}")
        writer = RunWriter.create(store, spec)
        writer.start(Machine("cpu", "benchmark", "rehearsal"))
        for step in range(3):
            writer.add_step(StepRecord(step, loss=3.0 - step, scale=2.0**16, grad_norm=1.0))
        writer.finish(State.FINISHED)
        writer.close()


def measure(store: Path, page: str, rounds: int, **query: str) -> dict[str, list[float]]:
    """Medians of [wall, CPU] in seconds. The first session is left out: it imports the page."""
    os.environ["AMPSCOPE_STORE"] = str(store)
    times: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        app = session(page, **query)
        found = {"first": seconds(app.run), "again": seconds(app.run), **interactions(app, page)}
        if turn:
            for name, value in found.items():
                times.setdefault(name, []).append(value)
    return {name: np.median(values, axis=0).round(3).tolist() for name, values in times.items()}


def interactions(app: Any, page: str) -> dict[str, tuple[float, float]]:
    """What people move, and what they ask for, there."""
    if page == "loss_scale" and app.toggle:  # a short run has none
        app.toggle(key="loss-scale:advice").set_value(True)
        advice = seconds(app.run)
        app.toggle(key="loss-scale:lab").set_value(True)
        return {"advice_of_300_steps": advice, "lab_of_all_steps": seconds(app.run)}
    if page != "gradients":
        return {}
    app.slider(key="gradients:scale").set_value(7)
    slider = seconds(app.run)
    steps = app.select_slider(key="widget:step").options
    app.select_slider(key="widget:step").set_value(int(steps[len(steps) // 2]))
    step = seconds(app.run)
    app.button_group(key="widget:detail").set_value("one module")
    one = seconds(app.run)
    app.toggle(key="gradients:history").set_value(True)
    history = seconds(app.run)
    app.button_group(key="widget:detail").set_value("lost over time")
    return {
        "slider": slider,
        "step": step,
        "one_module": one,
        "history_of_one_module": history,
        "lost_over_time": seconds(app.run),
    }


def session(page: str, **query: str) -> Any:
    """A new session on empty caches."""
    import streamlit as st
    from streamlit.components.v2 import manifest_scanner
    from streamlit.testing.v1 import AppTest

    # A server looks through the installed packages once, the test runner for every session.
    manifest_scanner.scan_component_manifests = list  # type: ignore[assignment]

    st.cache_data.clear()
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=120)
    if page != "home":  # which opens first
        app.switch_page(str(ROOT / "pages" / f"{page}.py"))
    for name, value in query.items():
        app.query_params[name] = value
    return app


def seconds(function: Any) -> tuple[float, float]:
    """(wall, CPU) of one run of a page, all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    app = function()
    elapsed = time.perf_counter() - wall, time.process_time() - cpu
    if app.exception or app.error or not (app.metric or app.caption):
        raise RuntimeError(f"the page failed: {[e.message for e in app.exception]}")
    return elapsed


def size_mib(store: Path) -> float:
    """The store with its write-ahead log."""
    return sum(f.stat().st_size for f in store.parent.glob(f"{store.name}*")) / 2**20


if __name__ == "__main__":
    main()
