"""Does a watcher grow? 100,000 steps of a small training, memory read every 5,000 of them.

    python benchmarks/watch_memory.py                  # results/watch_memory.json

Python's own memory by tracemalloc, the process's by its resident set. What waits to be written
comes and goes, so each reading is made after a flush. The model has 2 modules, each step has a
batch of its own, and the default schedule is used; every 1,000th step is bad, so that the schedule
tightens and capsules are kept. Ingestion is the time of 5,000 steps: it must be as long at the end
as at the beginning.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import tracemalloc
from pathlib import Path

import psutil
import torch
from contest import setting
from torch import nn

import ampscope

RESULTS = Path(__file__).parent / "results" / "watch_memory.json"
BAD_EVERY = 1_000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=100_000)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    bad = torch.full((4, 8), float("nan"))
    turn, readings = given.steps // 20, []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        with ampscope.watch(model, optimizer, store=store, policy="ignore") as run:
            tracemalloc.start()
            for number in range(20):
                started, cpu = time.perf_counter(), time.process_time()
                for step in range(turn):
                    is_bad = step % BAD_EVERY == BAD_EVERY - 1
                    model(bad.clone() if is_bad else torch.randn(4, 8)).square().mean().backward()
                    if is_bad:  # seen, and taken back: the weights stay finite
                        kept = [p.detach().clone() for p in model.parameters()]
                    optimizer.step()
                    if is_bad:
                        with torch.no_grad():
                            for parameter, old in zip(model.parameters(), kept, strict=True):
                                parameter.copy_(old)
                    optimizer.zero_grad()
                run._session.recorder.wait(60)
                gc.collect()
                readings.append(
                    {
                        "steps": (number + 1) * turn,
                        "python_kib": round(tracemalloc.get_traced_memory()[0] / 1024),
                        "resident_mib": round(psutil.Process().memory_info().rss / 2**20, 1),
                        "wall_s": round(time.perf_counter() - started, 2),
                        "cpu_s": round(time.process_time() - cpu, 2),
                        "store_mib": round(store.stat().st_size / 2**20, 2),
                    }
                )
                print(readings[-1], flush=True)
            tracemalloc.stop()
    half = len(readings) // 2
    result = {
        "setting": setting(),
        "readings": readings,
        "python_growth_bytes_a_step": growth(readings[half:], "python_kib", 1024),
        "resident_growth_bytes_a_step": growth(readings[half:], "resident_mib", 2**20),
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(RESULTS)


def growth(readings: list[dict[str, float]], name: str, unit: int) -> float:
    """Slope over the second half of the run, by least squares, in bytes per step."""
    xs, ys = [r["steps"] for r in readings], [r[name] * unit for r in readings]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    across = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    return round(across / sum((a - x) ** 2 for a in xs), 3)


if __name__ == "__main__":
    main()
