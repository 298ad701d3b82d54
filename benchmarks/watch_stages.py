"""Where the time of a quiet watched step goes, by stage, as JSON.

    python benchmarks/watch_stages.py            # results/watch_stages.json

ResNet small in fp32, `ampscope.watch(every=0)`: no histogram is counted. Each stage is timed by a
wrapper around the method that does it, with the wrapper's own price. Some stages hold others:
``gradients_complete`` holds ``start_norms``, ``_step_ended`` holds ``_finish``. The price of a
whole step is that of interleaved turns of ten steps with and without the watch.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contest import setting
from overhead_contestants import Session

import ampscope
from ampscope.watcher import session as steps
from ampscope.watcher.flight import FlightRecorder
from ampscope.watcher.watched_optimizers import WatchedOptimizers

OUT = Path(__file__).parent / "results" / "watch_stages.json"
STEPS, TURNS, TURN = 200, 40, 10
STAGES: tuple[tuple[Any, str], ...] = (
    (steps.Session, "gradients_complete"), (steps, "start_norms"), (WatchedOptimizers, "gradients"),
    (FlightRecorder, "_begun"), (FlightRecorder, "_ended"), (steps.Session, "_step_ended"),
    (steps.Session, "_finish"), (steps.Session, "before_step"), (steps.Session, "after_step"),
)  # fmt: skip


def main() -> None:
    session = Session("resnet", "small", torch.device("cpu"), "native", "fp32")
    model, optimizer = session.training.model, session.training.optimizer
    store = Path(tempfile.mkdtemp(prefix="ampscope-benchmark-")) / "runs.db"
    run = ampscope.watch(model, optimizer, every=0, store=store)
    run._session.detach()
    bare, watched = [], []
    for turn in range(TURNS):
        bare.append(timed(session.step))
        run._session.attach(turn * TURN)
        watched.append(timed(session.step))
        run._session.detach()
    ratios = [one / other for one, other in zip(watched[3:], bare[3:], strict=True)]
    times: dict[str, list[float]] = defaultdict(list)
    for owner, name in STAGES:
        setattr(owner, name, clocked(getattr(owner, name), times[name]))
    run._session.attach(TURNS * TURN)
    for _ in range(STEPS):
        session.step()
    run.close()
    document = {
        "setting": setting(),
        "bare_step_ms": round(statistics.median(bare) * 1e3, 2),
        "ratio_quartiles": [round(one, 4) for one in statistics.quantiles(ratios, n=4)],
        "ms_per_step": {name: round(sum(s) / STEPS * 1e3, 4) for name, s in times.items()},
    }
    OUT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


def timed(step: Callable[[], None]) -> float:
    """Seconds per step, of one turn."""
    started = time.perf_counter()
    for _ in range(TURN):
        step()
    return (time.perf_counter() - started) / TURN


def clocked(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """``method``, which adds to ``seconds`` what each call takes."""

    @functools.wraps(method)
    def wrapper(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*given, **named)
        finally:
            seconds.append(time.perf_counter() - started)

    return wrapper


if __name__ == "__main__":
    main()
