"""Which step was under way at a moment: readings of a machine laid beside the steps of a run."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ampscope.records import Sample, StepRecord


def steps_at(samples: Sequence[Sample], steps: Sequence[StepRecord]) -> list[int | None]:
    """The step under way at each reading; None before the first, after the last, and where no step
    has a time. Between steps that are not next to each other it is estimated."""
    timed = [(s.ended_at, s.step, s.step_time_s) for s in steps if s.ended_at is not None]
    if not timed:
        return [None] * len(samples)
    ends = [end for end, _, _ in timed]
    begin = ends[0] - (timed[0][2] or 0.0)
    return [
        None if not begin <= s.at <= ends[-1] else _step_at(s.at, ends, [n for _, n, _ in timed])
        for s in samples
    ]


def _step_at(at: float, ends: Sequence[float], numbers: Sequence[int]) -> int:
    place = bisect.bisect_left(ends, at)
    if place == 0 or numbers[place] - numbers[place - 1] == 1:
        return numbers[place]
    share = (at - ends[place - 1]) / (ends[place] - ends[place - 1])
    return numbers[place - 1] + round(share * (numbers[place] - numbers[place - 1]))
