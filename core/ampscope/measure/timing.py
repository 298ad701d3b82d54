"""One call, timed often: median and quartiles."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ampscope.records import Timing


def summary(seconds: Sequence[float]) -> Timing:
    """Median and quartiles of at least one time."""
    low, median, high = np.percentile(seconds, (25, 50, 75))
    return Timing(float(median), float(low), float(high), len(seconds))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(
    call: Callable[[], object],
    device: torch.device,
    *,
    budget_s: float,
    least: int = 5,
    most: int = 200,
) -> Timing:
    """Call it for about ``budget_s`` seconds, from ``least`` to ``most`` times, after one call that
    does not count. On CUDA the times are the device's own, by events; a host that is slow to launch
    then shows nowhere, which is right for one op and wrong for a training step."""
    call()
    synchronize(device)
    return summary(
        _device_times(call, device, budget_s, least, most)
        if device.type == "cuda"
        else _host_times(call, budget_s, least, most)
    )


def _host_times(call: Callable[[], object], budget_s: float, least: int, most: int) -> list[float]:
    found: list[float] = []
    ends = time.perf_counter() + budget_s
    while len(found) < least or (len(found) < most and time.perf_counter() < ends):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return found


def _device_times(
    call: Callable[[], object], device: torch.device, budget_s: float, least: int, most: int
) -> list[float]:
    """Launched a handful at a time, so that the device rarely waits for the host. Of an op shorter
    than its launch (some 5 us) it is the launch that is timed."""
    found: list[float] = []
    ends = time.perf_counter() + budget_s
    with torch.cuda.device(device):
        while len(found) < least or (len(found) < most and time.perf_counter() < ends):
            marks = [_mark() for _ in range(least + 1)]
            marks[0].record()
            for mark in marks[1:]:
                call()
                mark.record()
            torch.cuda.synchronize(device)
            pairs = itertools.pairwise(marks)
            found += [a.elapsed_time(b) / 1000 for a, b in pairs]
    return found


def _mark() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event  # torch leaves its constructor untyped
