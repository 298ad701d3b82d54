"""What spoiled a measurement, by the readings beside it: clocks that were held down, and others who
used the device meanwhile. Sentences, or nothing where the readings show nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ampscope.hardware.gpu import IDLE
from ampscope.records import Sample

HELD_SHARE = 0.2  # of the readings: one in five is more than the moment at which a load begins
OTHERS_PERCENT = 10.0  # of the CPU: an idle machine's own services stay under five


def held_down(samples: Sequence[Sample]) -> str:
    """What held the clocks down in at least a fifth of the GPU's readings, or nothing."""
    readings = [s for s in samples if s.device != "cpu"]
    words = [reason for s in readings for reason in set(_reasons(s))]
    counts = {word: words.count(word) for word in words}
    often = {w: n for w, n in counts.items() if n >= HELD_SHARE * len(readings)}
    if not often:
        return ""
    named = " and ".join(f"{w} in {n / len(readings):.0%}" for w, n in sorted(often.items()))
    return f"The clocks were held down in the readings beside it: {named} of {len(readings)}."


def _reasons(sample: Sample) -> list[str]:
    words = (word.strip() for word in sample.clock_reasons.split(","))
    return [word for word in words if word and word != IDLE]


def shared(samples: Sequence[Sample]) -> str:
    """Who else used the CPU, or held memory on the GPU, in the middle of the readings."""
    others = [
        max(0.0, s.busy_percent - s.own_percent)
        for s in samples
        if s.device == "cpu" and s.busy_percent is not None and s.own_percent is not None
    ]
    middle = statistics.median(others) if others else 0.0
    if middle >= OTHERS_PERCENT:
        return (
            f"Other processes used {middle:.0f} % of the CPU meanwhile (median of {len(others)} "
            "readings), so these rates are too low: measure again when it is idle."
        )
    counts = [s.other_processes for s in samples if s.other_processes is not None]
    if counts and statistics.median(counts) >= 1:
        return "Other processes held memory on the GPU meanwhile: the rates may be too low."
    return ""
