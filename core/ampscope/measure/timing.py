"""One call, timed often: median and quartiles; and how much time there is left."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ampscope.records import Timing

USABLE_SHARE = 0.9  # of the time limit; what ends at it has lost its results


class Limit:
    """The time limit, of which a little is left over for the end."""

    def __init__(self, limit_s: float) -> None:
        self._began = time.monotonic()
        self._limit_s = limit_s * USABLE_SHARE

    def gone_s(self) -> float:
        """Since the measurement began."""
        return time.monotonic() - self._began

    def left_s(self) -> float:
        """Negative when it has passed."""
        return self._limit_s - self.gone_s()


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
    found: list[float] = []
    ends = time.perf_counter() + budget_s
    in_a_row = least if device.type == "cuda" else 1
    while len(found) < least or (len(found) < most and time.perf_counter() < ends):
        found += times(call, device, in_a_row)
    return summary(found)


def times(call: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Seconds of so many calls in a row. On CUDA by the device's own clock, launched without
    waiting for it: of an op shorter than its launch (some 5 us) it is the launch that is timed."""
    if device.type != "cuda":
        found = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
        return found
    with torch.cuda.device(device):
        marks = [mark() for _ in range(count + 1)]
        marks[0].record()
        for after in marks[1:]:
            call()
            after.record()
        synchronize(device)
        return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]


def mark() -> torch.cuda.Event:
    """An event that holds the device's time, once it is recorded."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event  # torch leaves its constructor untyped
