"""What a crooked size costs: the time of one multiplication at 8n + 1, 2 or 4 over that at 8n.

    worst(costs(rates)).sentence        "K = 4097 costs 2.3 times what K = 4096 costs …"

Times are divided by the number of multiplications: 68 channels make more of them than 64. The cost
is that beside the middle of the sizes that were measured; how it is beside the others is said too.
It counts only from ten percent on, and where the quartiles of the two times are apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.records import Rate

STEP = 8
DIMENSIONS = {"align_m": "M", "align_n": "N", "align_k": "K", "align_channels": "channels"}
_AXIS = {"align_m": 0, "align_n": 1, "align_k": 2, "align_channels": 1}
LEAST_COST = 1.10  # spread of one time on a busy machine is about ten percent


@dataclass(frozen=True, slots=True)
class Cost:
    """One dimension and offset in one dtype (and layout)."""

    series: str
    dtype: str
    layout: str
    size: int  # the multiple of 8 in the middle
    offset: int
    ratio: float  # of the times of one multiplication, at this size
    low: float  # smallest and largest over the sizes
    high: float
    is_apart: bool  # the quartiles of both times

    @property
    def counts(self) -> bool:
        """Whether it is more than noise."""
        return self.is_apart and self.ratio >= LEAST_COST

    @property
    def sentence(self) -> str:
        """``K = 4097 costs 2.3 times the time that K = 4096 costs, … (fp16; 2.20 to 2.40 …).``"""
        where = f"{self.dtype}{', ' + self.layout if self.layout else ''}"
        crooked = _named(self, self.size + self.offset)
        return (
            f"{crooked[0].upper()}{crooked[1:]} costs {self.ratio:.2g} times the time that "
            f"{_named(self, self.size)} costs, for each multiplication ({where}; {self.low:.2f} to "
            f"{self.high:.2f} at all sizes tried)."
        )


def costs(rates: Sequence[Rate]) -> list[Cost]:
    """Every offset of every series, dtype and layout that was measured."""
    groups: dict[tuple[str, str, str], dict[int, Rate]] = defaultdict(dict)
    for rate in rates:
        if rate.series in DIMENSIONS and rate.timing is not None:
            key = (rate.series, rate.dtype, rate.layout)
            groups[key][position(rate)] = rate
    return [cost for key, at in groups.items() for cost in _costs_of(key, at)]


def worst(found: Sequence[Cost]) -> Cost | None:
    """The dearest one that is more than noise: of the halves, for which alignment matters most, or
    of fp32 where the halves have none."""
    real = [c for c in found if c.counts]
    halves = [c for c in real if c.dtype != "fp32"]
    return max(halves or real, key=lambda c: c.ratio, default=None)


def sentence(found: Sequence[Cost]) -> str:
    """What the measurement shows, or that it shows nothing; empty where there is none."""
    if not found:
        return ""
    dearest = worst(found)
    if dearest is not None:
        return dearest.sentence
    top = max(found, key=lambda c: c.ratio)
    return (
        "No crooked size costs ten percent or more beyond the noise here; the dearest, "
        f"{_named(top, top.size + top.offset)} in {top.dtype}, takes "
        f"{top.ratio:.2f} times the time of {top.size} for each multiplication."
    )


def position(rate: Rate) -> int:
    """The varied dimension's value."""
    return rate.shape[_AXIS[rate.series]]


def _named(cost: Cost, size: int) -> str:
    """``K = 4097``, ``a convolution of 65 channels``"""
    if cost.series == "align_channels":
        return f"a convolution of {size} channels"
    return f"{DIMENSIONS[cost.series]} = {size}"


def _costs_of(key: tuple[str, str, str], at: dict[int, Rate]) -> list[Cost]:
    even = sorted(size for size in at if size % STEP == 0)
    offsets = sorted({size % STEP for size in at} - {0})
    found = []
    for offset in offsets:
        sizes = [size for size in even if size + offset in at]
        pairs = [(_each(at[size]), _each(at[size + offset])) for size in sizes]
        if not pairs:
            continue
        ratios = [crooked[1] / straight[1] for straight, crooked in pairs]
        middle = (len(sizes) - 1) // 2
        found.append(
            Cost(
                *key,
                size=sizes[middle],
                offset=offset,
                ratio=ratios[middle],
                low=min(ratios),
                high=max(ratios),
                is_apart=pairs[middle][1][0] > pairs[middle][0][2],
            )
        )
    return found


def _each(rate: Rate) -> tuple[float, float, float]:
    """First quartile, median and third quartile of the time of one multiplication."""
    timing = rate.timing
    assert timing is not None  # rates without one were left out
    return timing.low_s / rate.flops, timing.median_s / rate.flops, timing.high_s / rate.flops
