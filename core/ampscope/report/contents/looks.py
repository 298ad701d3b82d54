"""How curves look: an axis that holds them, a colour that is a dtype's where a dtype is meant, and
a dash that tells curves of one colour apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ampscope.report.colours import DTYPES, MEASURE, of_dtype

LOG_FROM = 100.0  # two decades between the smallest and the largest value
DASHES = ("", "9 6", "2 4", "9 4 2 4")  # SVG's stroke-dasharray
Look = tuple[str, str]  # colour, dash


def base(values: Sequence[float]) -> int:
    """Of the axis: 10 for positive values that are far apart, else 0, a linear one."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return 10 if low > 0 and high / low >= LOG_FROM else 0


def looks(names: Sequence[str]) -> list[Look]:
    """One for each name. A name that begins with a dtype ("fp16-noscaler", "bf16 with fp32 master
    weights") has that dtype's colour, every other the colour that means no dtype."""
    drawn: Counter[str] = Counter()
    found = []
    for name in names:
        first = re.split(r"\W", name, maxsplit=1)[0]
        colour = of_dtype(first) if first in DTYPES else MEASURE
        found.append((colour, DASHES[drawn[colour] % len(DASHES)]))
        drawn[colour] += 1
    return found
