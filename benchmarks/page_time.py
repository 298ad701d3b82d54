"""Server time of the run pages over a run of 500 modules x 1,000 steps, and what its store weighs.

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

from ampscope.records import Role

ROOT = Path(__file__).resolve().parent.parent

RESULTS = ROOT / "benchmarks" / "results" / "page_time.json"
GOAL_S, GOAL_MIB = 0.5, 300.0
PAGES = ("layers", "gradients", "loss_scale")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--modules", type=int, default=500)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--rounds", type=int, default=7)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        run = write_run(store, given.modules, given.steps)
        result = {
            "run": {"modules": given.modules, "steps": given.steps, "roles": len(Role)},
            "store_mib": round(size_mib(store), 1),
            "goal": {"page_s": GOAL_S, "store_mib": GOAL_MIB},
            "pages_s": {page: measure(store, run, page, given.rounds) for page in PAGES},
            "setting": setting(),
        }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(store: Path, run: str, page: str, rounds: int) -> dict[str, list[float]]:
    """Medians of [wall, CPU] in seconds. The first session is left out: it imports the page."""
    os.environ["AMPSCOPE_STORE"] = str(store)
    times: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        app = session(page, run)
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


def session(page: str, run: str) -> Any:
    """A new session on empty caches."""
    import streamlit as st
    from streamlit.testing.v1 import AppTest

    st.cache_data.clear()
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=120)
    if page != "home":  # which opens first
        app.switch_page(str(ROOT / "pages" / f"{page}.py"))
    app.query_params["run"] = run
    return app


def seconds(function: Any) -> tuple[float, float]:
    """(wall, CPU) of one run of a page, all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    app = function()
    elapsed = time.perf_counter() - wall, time.process_time() - cpu
    if app.exception or not app.metric:
        raise RuntimeError(f"the page failed: {[e.message for e in app.exception]}")
    return elapsed


def size_mib(store: Path) -> float:
    """The store with its write-ahead log."""
    return sum(f.stat().st_size for f in store.parent.glob(f"{store.name}*")) / 2**20


if __name__ == "__main__":
    main()
