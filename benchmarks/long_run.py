"""Server time of every page over a watched run of 100,000 steps, beside one of 1,000 steps.

    python benchmarks/long_run.py            # results/long_run.json; about five minutes

Both runs have 200 modules and histograms at every tenth step. They are written through RunWriter as
`ampscope.watch` writes them, so that the store thins the older frames. Pages are drawn as in
page_time.py: `first` is a new session on empty caches, `again` the same session once more, `part` a
part of the run in full resolution. Each is [wall, CPU] seconds; `ratio` is long over short, of CPU.
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
from page_time import session, size_mib
from watched_run import ROLES, write_watched

from ampscope.records import Role
from ampscope.store.reader import Reader

RESULTS = Path(__file__).resolve().parent / "results" / "long_run.json"
GOAL_S = 1.0
PAGES = ("home", "training", "loss_scale", "gradients", "layers")
Times = dict[str, list[float]]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--modules", type=int, default=200)
    arguments.add_argument("--steps", type=int, nargs=2, default=(1000, 100_000))
    arguments.add_argument("--every", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=7)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [one(Path(folder), given, steps) for steps in given.steps]
    result = {
        "run": {"modules": given.modules, "every": given.every, "roles": [str(r) for r in ROLES]},
        "goal": {"page_first_s": GOAL_S},
        "runs": runs,
        "ratio_cpu": {page: ratios(*(run["pages_s"][page] for run in runs)) for page in PAGES},
        "setting": setting(),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def one(folder: Path, given: argparse.Namespace, steps: int) -> dict[str, Any]:
    """One run in a store of its own, and the times of its pages."""
    store = folder / f"{steps}.db"
    started = time.perf_counter()
    run = write_watched(store, given.modules, steps, given.every)
    written_s = time.perf_counter() - started
    with Reader(store) as reader:
        spans = reader.frame_spans(run, Role.ACTIVATION)
    return {
        "steps": steps,
        "written_s": round(written_s, 1),
        "store_mib": round(size_mib(store), 1),
        "frames_a_role": len(spans),
        "pages_s": {page: measure(store, run, page, given.rounds, steps) for page in PAGES},
    }


def measure(store: Path, run: str, page: str, rounds: int, steps: int) -> Times:
    """Medians of [wall, CPU] in seconds. The first session is left out: it imports the page."""
    os.environ["AMPSCOPE_STORE"] = str(store)
    times: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        app = session(page, run=run)
        found = {"first": seconds(app.run), "again": seconds(app.run)}
        if page == "loss_scale":
            app.query_params["first"], app.query_params["last"] = str(steps // 2), str(steps - 1)
            found["part"] = seconds(app.run)
        if turn:
            for name, value in found.items():
                times.setdefault(name, []).append(value)
    return {name: np.median(values, axis=0).round(3).tolist() for name, values in times.items()}


def seconds(function: Any) -> tuple[float, float]:
    """(wall, CPU) of one run of a page, all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    app = function()
    elapsed = time.perf_counter() - wall, time.process_time() - cpu
    if app.exception or app.error or not app.subheader:
        raise RuntimeError(f"the page failed: {[e.value for e in app.error]}")
    return elapsed


def ratios(short: Times, long: Times) -> dict[str, float]:
    """How much more the long run takes."""
    return {name: round(long[name][1] / short[name][1], 2) for name in short}


if __name__ == "__main__":
    main()
