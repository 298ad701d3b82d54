"""Several calls timed in turns, so that drift (clocks, heat, other processes) falls on all alike.

A call that is slow enough to eat the time of the others is left out, with the reason; whoever
knows its rate at a smaller size predicts that before the first call is made.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ampscope.errors import Cancelled
from ampscope.measure.timing import summary, synchronize
from ampscope.records import Timing

Call = Callable[[], object]
Stop = Callable[[], bool]

TURN_S = 0.01  # a fast call is made this long in a row: one alone would find its data out of cache
LEAST, MOST = 7, 200  # times of one call
STOPPED = "Cancelled between two measurements."


@dataclass(slots=True)
class Turns:
    """One call and its times so far."""

    call: Call
    each: int  # calls a turn
    seconds: list[float] = field(default_factory=list)


def first_time(call: Call, device: torch.device) -> float:
    """Seconds of the second call: the first one loads kernels and chooses among them. A call that
    takes over a second is not repeated. Raises what the call raises."""
    took = _seconds(call, device)
    return took if took > 1 else _seconds(call, device)


def interleaved(
    calls: Sequence[tuple[Call, float]], device: torch.device, budget_s: float, stop: Stop
) -> list[Timing]:
    """Median and quartiles of each call, given with about how long it takes: rounds over all of
    them, for about ``budget_s`` seconds in all and at least :data:`LEAST` times each. Raises
    Cancelled between two turns when ``stop()`` is true."""
    turns = [Turns(call, _each(seconds)) for call, seconds in calls]
    ends = time.perf_counter() + budget_s
    while _goes_on(turns, time.perf_counter() < ends):
        for turn in turns:
            if stop():
                raise Cancelled(STOPPED)
            if len(turn.seconds) < MOST:
                turn.seconds += times(turn.call, device, turn.each)
    return [summary(turn.seconds) for turn in turns]


def times(call: Call, device: torch.device, count: int) -> list[float]:
    """So many times of one call in a row: on CUDA the device's own, launched without waiting."""
    if device.type != "cuda":
        found = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
        return found
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]  # torch's own
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        synchronize(device)
        return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]


def _each(seconds: float) -> int:
    return max(1, min(20, int(TURN_S / max(seconds, 1e-6))))


def _goes_on(turns: Sequence[Turns], has_time: bool) -> bool:
    fewest = min((len(turn.seconds) for turn in turns), default=MOST)
    return fewest < (MOST if has_time else LEAST)


def _seconds(call: Call, device: torch.device) -> float:
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started
