"""What reading the machine ten times per second costs. Writes results/sampler_cost.json.

    python benchmarks/sampler_cost.py [--seconds 60] [--rounds 40]

The sampler's own processor time (user and system, as the kernel counts it for a process that has
ended) over a minute beside a process that keeps one core busy, with and without its start; and the
steps of a training, on one thread, beside it against the same steps while it stands still
(SIGSTOP), in turn. The training writes its steps into the same store twice a second, as a probe
does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from contest import interleaved, setting
from overhead_contestants import Session

from ampscope.records import Machine, RunSpec, State, StepRecord
from ampscope.runner.device import uuid_of
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.telemetry.own_processes import process_clock_ns

OUT = Path(__file__).parent / "results" / "sampler_cost.json"
GOAL_PERCENT = 1.0
STARTED_S = 2.0  # after that the sampler has long been in its loop
STEPS = 20  # of the training, in a turn
CPU = torch.device("cpu")


class Beside:
    """A store with one run, and a sampler that reads beside this process."""

    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        self.writer = RunWriter.create(folder / "runs.db", RunSpec(workload="gpt"))
        self.writer.start(Machine(device=str(device), device_name="", policy="native"))
        command = [
            sys.executable,
            "-m",
            "ampscope.telemetry.sampler",
            "--store",
            str(self.writer.path),
            "--device",
            str(device),
            "--uuid",
            uuid_of(device),
        ]
        self.process = subprocess.Popen(
            [*command, "--run", self.writer.run_id, "--pid", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def used_s(self) -> float:
        """Processor time so far."""
        return (process_clock_ns(self.process.pid) or 0) / 1e9

    def end(self) -> tuple[float, int]:
        """Stop it: its processor time in all, and how many readings there are."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        _, _, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = 0  # it has been waited for
        self.writer.finish(State.FINISHED)
        self.writer.close()
        with Reader(self.writer.path) as reader:
            return usage.ru_utime + usage.ru_stime, len(reader.samples(self.writer.run_id))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--rounds", type=int, default=40)
    given = arguments.parse_args()
    result: dict[str, object] = {"setting": setting(), "goal_percent": GOAL_PERCENT}
    for name, measure in (("minute", minute), ("steps", steps)):
        with tempfile.TemporaryDirectory() as folder:
            result[name] = measure(Path(folder), given)
        print(name, result[name], flush=True)
    result["load_average_after"] = setting()["load_average"]
    OUT.write_text(json.dumps(result, indent=1) + "\n")


def minute(folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Percent of a core."""
    torch.set_num_threads(1)
    product = torch.randn(512, 512)
    begun, beside = time.monotonic(), Beside(folder)
    at_start = None
    while time.monotonic() - begun < given.seconds:
        product @ product
        if at_start is None and time.monotonic() - begun >= STARTED_S:
            at_start = (time.monotonic(), beside.used_s())
    assert at_start is not None
    seconds, used_s = time.monotonic() - at_start[0], beside.used_s() - at_start[1]
    whole_s, readings = beside.end()
    return {
        "percent_of_a_core": round(100 * used_s / seconds, 3),
        "percent_with_start": round(100 * whole_s / (time.monotonic() - begun), 3),
        "start_s": round(at_start[1], 3),
        "readings_a_second": round(readings / (time.monotonic() - begun), 2),
        "seconds": round(time.monotonic() - begun, 1),
    }


def steps(folder: Path, given: argparse.Namespace) -> dict[str, object]:
    """Time of a step beside a sampler over its time beside one that stands still."""
    torch.set_num_threads(1)  # on a machine that others use too, a second one waits for them
    beside = Beside(folder)
    time.sleep(STARTED_S)
    train = training(beside.writer)

    def standing() -> None:
        os.kill(beside.process.pid, signal.SIGSTOP)

    def going() -> None:
        os.kill(beside.process.pid, signal.SIGCONT)
        time.sleep(0.3)  # what it has missed is over

    # In the order alone, beside, beside, alone: a drift within a round falls on both alike.
    before = {"first": standing, "second": going, "third": lambda: None, "fourth": standing}
    times = interleaved(dict.fromkeys(before, train), given.rounds, before=before)
    going()
    beside.end()
    first, second, third, fourth = (np.array(seconds) for seconds in times.values())
    ratios = np.percentile((second + third) / (first + fourth), (25, 50, 75))
    noise = np.percentile(np.maximum(first, fourth) / np.minimum(first, fourth), (25, 50, 75))
    return {
        "step_ms_alone": round(1000 * float(np.median(first)) / STEPS, 3),
        "ratio_beside": [round(float(ratio), 4) for ratio in ratios],  # quartiles over the rounds
        "ratio_of_two_alone": [round(float(ratio), 4) for ratio in noise],  # the slower of each two
        "rounds": given.rounds,
        "steps_a_turn": STEPS,
    }


def training(writer: RunWriter) -> Callable[[], None]:
    """A function that makes :data:`STEPS` steps of a small GPT under bf16 autocast."""
    session, number = Session("gpt", "tiny", torch.device("cpu"), "native"), itertools.count()

    def turn() -> None:
        for _ in range(STEPS):
            session.train()
            writer.add_step(StepRecord(next(number), loss=1.0, ended_at=time.time()))
            writer.flush_if_due()

    return turn


if __name__ == "__main__":
    main()
