"""What watching costs a Paddle training on a CPU, as a ratio to the bare step.

    OMP_WAIT_POLICY=PASSIVE PYTHONPATH=core PYTHON benchmarks/overhead_paddle.py [--rounds N]

in a Python that has Paddle.

Every network trains several times side by side in one process, and the contestants alternate in a
new order each round, so that whatever else the machine does falls on all of them alike. A round
gives one ratio a contestant: its time over the bare one's in that round. Shown are the median and
the quartiles of these ratios. fp16 is emulated (bare as well); fp32 is Paddle as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.paddle import Watch
from ampscope.ext.frameworks.paddle.adapter import PaddleTraining
from ampscope.ext.frameworks.paddle.applied_settings import Scalers
from ampscope.ext.frameworks.paddle.emulation import Emulation
from ampscope.ext.frameworks.paddle.regions import OpenRegion
from ampscope.patches import Patches
from ampscope.records import RunSpec

GOALS = {"everything": 1.30, "scale and skips": 1.05}
RESULTS = Path(__file__).parent / "results"
NETWORKS = ("lenet", "transformer", "wide")


class Wide:
    """Three wide linear layers, 256 samples a batch: a step of well over 20 ms."""

    def __init__(self, half: bool) -> None:
        nn: Any = paddle.nn
        self.half = half
        self.model = nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        self.optimizer = paddle.optimizer.SGD(0.01, parameters=self.model.parameters())
        self.scaler = paddle.amp.GradScaler(enable=half)
        generator = np.random.default_rng(0)
        self.inputs = paddle.to_tensor(generator.normal(size=(256, 512)).astype("float32"))
        self.labels = paddle.to_tensor(generator.integers(0, 10, 256))

    def step(self) -> None:
        """Forward, backward, update."""
        with paddle.amp.auto_cast(enable=self.half):
            loss = paddle.nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.clear_grad()


def stepper(name: str, half: bool) -> Callable[[], None]:
    """One training of that network; a call is a step."""
    if name == "wide":
        return Wide(half).step
    training = PaddleTraining(RunSpec(workload=name, precision="fp16" if half else "fp32"))
    batches = [next(training.batches) for _ in range(8)]
    turn = iter(lambda: 0, 1)

    def step() -> None:
        next(turn)
        step.number += 1  # type: ignore[attr-defined]
        training.step(*batches[step.number % 8])  # type: ignore[attr-defined]

    step.number = 0  # type: ignore[attr-defined]
    return step


def measured(name: str, half: bool, rounds: int, folder: Path) -> dict[str, Any]:
    """Ratios of one network in one precision."""
    with contextlib.ExitStack() as stack:
        if half:
            Scalers(ControlSettings(), on_cpu=True).put_on(stack.enter_context(Patches()))
            stack.enter_context(Emulation(OpenRegion()).active())
        contestants = {n: stepper(name, half) for n in ("bare", *GOALS)}
        watches = {
            "everything": Watch(histograms_every=1, store=folder / f"{name}{half}.db"),
            "scale and skips": Watch(store=folder / f"{name}{half}.db"),
        }
        for watch in watches.values():
            watch.open()
        for contestant, step in contestants.items():
            with _watching(watches.get(contestant)):
                for _ in range(3):
                    step()
        began = time.perf_counter()
        contestants["bare"]()
        steps = max(1, int(0.05 / max(time.perf_counter() - began, 1e-4)))
        times: dict[str, list[float]] = {n: [] for n in contestants}
        cpu: dict[str, list[float]] = {n: [] for n in contestants}
        for _ in range(rounds):
            order = random.sample(list(contestants), len(contestants))
            for contestant in order:
                with _watching(watches.get(contestant)):
                    began, cpu_began = time.perf_counter(), time.process_time()
                    for _ in range(steps):
                        contestants[contestant]()
                    times[contestant].append((time.perf_counter() - began) / steps)
                    cpu[contestant].append((time.process_time() - cpu_began) / steps)
        for watch in watches.values():
            watch.close()
    found: dict[str, Any] = {"bare_ms": _quartiles([1e3 * t for t in times["bare"]])}
    for contestant, goal in GOALS.items():
        ratio, cpu_ratio = _ratios(times, contestant), _ratios(cpu, contestant)
        met = ratio["median"] <= goal
        found[contestant] = {"ratio": ratio, "cpu_ratio": cpu_ratio, "goal": goal, "met": met}
    return {"network": name, "precision": "fp16 emulated" if half else "fp32", "steps": steps,
            "rounds": rounds, **found}  # fmt: skip


@contextlib.contextmanager
def _watching(watch: Watch | None) -> Iterator[None]:
    if watch is None:
        yield
    else:
        with watch.attached():
            yield


def _ratios(times: dict[str, list[float]], contestant: str) -> dict[str, float]:
    pairs = zip(times[contestant], times["bare"], strict=True)
    return _quartiles([own / bare for own, bare in pairs])


def _quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"q1": round(low, 4), "median": round(middle, 4), "q3": round(high, 4)}


def main() -> None:
    """Measure all and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead_paddle.json")
    given = parser.parse_args()
    paddle.seed(0)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ampscope-benchmark-") as folder:
        for name in given.networks.split(","):
            for half in (True, False):
                rows.append(measured(name, half, given.rounds, Path(folder)))
                print(json.dumps(rows[-1]))
    result = {
        "paddle": str(paddle.__version__),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "rows": rows,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
