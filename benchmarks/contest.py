"""Timing contestants in turn, round after round, and saying on which machine it was.

A slow moment of the machine then hits all of them alike; medians and quartiles are over the rounds,
and the load averages before and after say how quiet the machine was.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

Contestants = Mapping[str, Callable[[], object]]


def on_cpu(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def interleaved(
    contestants: Contestants,
    rounds: int,
    clock: Callable[[Callable[[], object]], float] = on_cpu,
    before: Contestants | None = None,
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round. Two rounds more go first, unrecorded: they compile,
    start threads and fill caches. ``before`` is called, untimed, ahead of each contestant."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 2):
        for name, function in contestants.items():
            if before is not None:
                before[name]()
            elapsed = clock(function)
            if turn >= 2:
                times[name].append(elapsed)
    return times


def quartiles_ns(seconds: list[float], elements: int) -> list[float]:
    """First quartile, median and third quartile, in nanoseconds an element."""
    shares = np.percentile(np.array(seconds) / elements * 1e9, (25, 50, 75))
    return [round(float(share), 4) for share in shares]


def setting() -> dict[str, object]:
    """Machine, versions, date and load: what a number means nothing without."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "numba", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "versions": versions,
        "scheduler": {0: "normal", 1: "fifo"}.get(os.sched_getscheduler(0), "other"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
