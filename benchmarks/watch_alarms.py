"""False alarms of `ampscope.watch`: healthy, odd trainings of tests/healthy under default alarms.

    python benchmarks/watch_alarms.py [SCRIPT …] [--out benchmarks/results/watch_alarms.json]

Each script runs in a process of its own. The watch begins at the first step of an optimizer, over
every module that holds one of its parameters and is part of no other; it sees later steps.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import runpy
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import ampscope
from ampscope.store.reader import Reader

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "healthy"
RESULT = Path(__file__).resolve().parent / "results" / "watch_alarms.json"


def run_one(script: Path) -> dict[str, Any]:
    """In this process; how many steps were watched and which alarms rang."""
    runs: list[ampscope.Watch] = []

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if runs:
            return
        modules = [m for m in gc.get_objects() if isinstance(m, nn.Module)]
        inner = {id(child) for module in modules for child in module.children()}
        roots = [m for m in modules if id(m) not in inner and any(True for _ in m.parameters())]
        if roots:
            store = Path(tempfile.mkdtemp(prefix="ampscope-benchmark-")) / "runs.db"
            runs.append(ampscope.watch(roots, store=store, policy="ignore"))

    handle = register_optimizer_step_post_hook(begin)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runpy.run_path(str(script), run_name="__main__")
    handle.remove()
    if not runs:
        return {"script": script.stem, "steps": 0, "alarms": []}
    (run,) = runs
    run.close()
    alarms = [[alarm.step, alarm.name] for alarm in run.alarms]
    with Reader(run.store) as reader:
        stopped = [e.text for e in reader.events(run.id) if e.name == "stopped watching"]
    found = {"script": script.stem, "steps": run._session.now.step, "alarms": alarms}
    return found | ({"error": stopped[0]} if stopped else {})


def sent(script: Path, end: Any) -> None:
    """What came of the script, from the process that runs it."""
    try:
        end.send(run_one(script))
    except BaseException as error:
        end.send({"script": script.stem, "error": f"{type(error).__name__}: {error}"[:300]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--seconds", type=float, default=600.0, help="No script begins after it.")
    given = parser.parse_args()
    context = multiprocessing.get_context("fork")  # torch is imported once
    ends, results = time.monotonic() + given.seconds, []
    for script in given.scripts or sorted(FOLDER.glob("*.py")):
        if time.monotonic() > ends:
            break
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=sent, args=(script, there))
        child.start()
        there.close()
        one = {"script": script.stem, "error": "took over 120 s, or died"}
        if here.poll(120):
            with contextlib.suppress(EOFError):
                one = here.recv()
        child.kill()
        child.join()
        results.append(one)
        print(one, flush=True)
    summary = {
        "scripts": len(results),
        "steps": sum(one.get("steps", 0) for one in results),
        "alarms": sum(len(one.get("alarms", [])) for one in results),
        "errors": sum("error" in one for one in results),
        "results": results,
    }
    given.out.write_text(json.dumps(summary, indent=1) + "\n")
    print({key: value for key, value in summary.items() if key != "results"})


if __name__ == "__main__":
    main()
