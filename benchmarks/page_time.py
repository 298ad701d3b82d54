"""Server time of the run pages over a run of 500 modules x 1,000 steps, of Home and Runs over
2,000 runs, and what the store of the first weighs.

    python benchmarks/page_time.py            # results/page_time.json

Each page is drawn by Streamlit's own test runner through app/main.py: the script's time plus the
building of messages, without the network and the browser. `first` is a new session on empty caches,
`again` the same session once more, `slider` a move of the loss-scale slider. Each is [wall, CPU]
seconds: on a machine that does something else too, the second is what the page takes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from contest import setting
from large_run import write_run

from ampscope.records import Machine, Role, RunSpec, State, StepRecord
from ampscope.store.writer import RunWriter

ROOT = Path(__file__).resolve().parent.parent

RESULTS = ROOT / "benchmarks" / "results" / "page_time.json"
GOAL_S, GOAL_MIB = 0.5, 300.0
PAGES = ("layers", "gradients", "loss_scale", "two_runs")
OF_ALL = ("home", "runs")  # pages of the whole store


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--modules", type=int, default=500)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--runs", type=int, default=2000)
    arguments.add_argument("--out", type=Path, default=RESULTS)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        run = write_run(store, given.modules, given.steps)
        weight = size_mib(store)
        second = write_run(store, given.modules, given.steps)
        pages = {page: measure(store, run, page, given.rounds, second) for page in PAGES}
        many = Path(folder) / "many.db"
        write_many(many, given.runs)
        pages |= {page: measure(many, "", page, given.rounds) for page in OF_ALL}
        result = {
            "run": {"modules": given.modules, "steps": given.steps, "roles": len(Role)},
            "runs_of_home": given.runs,
            "store_mib": round(weight, 1),
            "goal": {"page_s": GOAL_S, "store_mib": GOAL_MIB},
            "pages_s": pages,
            "setting": setting(),
        }
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


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


def measure(
    store: Path, run: str, page: str, rounds: int, second: str = ""
) -> dict[str, list[float]]:
    """Medians of [wall, CPU] in seconds. The first session is left out: it imports the page."""
    os.environ["AMPSCOPE_STORE"] = str(store)
    times: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        app = session(page, run, second)
        found = {"first": seconds(app.run), "again": seconds(app.run), **interactions(app, page)}
        if turn:
            for name, value in found.items():
                times.setdefault(name, []).append(value)
    return {name: np.median(values, axis=0).round(3).tolist() for name, values in times.items()}


def interactions(app: Any, page: str) -> dict[str, tuple[float, float]]:
    """What people do most on the Gradients page."""
    if page != "gradients":
        return {}
    app.slider(key="gradients:scale").set_value(7)
    slider = seconds(app.run)
    app.select_slider(key="widget:step").set_value(500)
    step = seconds(app.run)
    app.toggle(key="gradients:history").set_value(True)
    return {"slider": slider, "step": step, "history_of_one_module": seconds(app.run)}


def session(page: str, run: str, second: str) -> Any:
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
    if run:
        app.query_params["run"] = run
    if second:
        app.query_params["second"] = second
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
