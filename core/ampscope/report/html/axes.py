"""Axes of the charts: where a value lies in a drawing, and which values are marked.

Drawings are SVG in units of about a pixel; y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.report.html.element import Markup, element
from ampscope.report.words.numbers import number, power_of_two

WIDTH = 900.0
LEFT, RIGHT = 74.0, 18.0
TICKS = 6
MOST = 1e300  # beyond it the sums below would leave the doubles; drawn at the edge
_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from ``low`` to ``high`` lie between the places ``start`` and ``end``; ``base`` 0 is
    linear, 2 or 10 logarithmic."""

    low: float
    high: float
    start: float
    end: float
    base: int = 0

    def place(self, value: float) -> float:
        """Where ``value`` lies."""
        low, high, at = (self._linear(x) for x in (self.low, self.high, value))
        span = high - low or 1.0  # of values that only differ where a float cannot
        return self.start + (at - low) / span * (self.end - self.start)

    def _linear(self, value: float) -> float:
        value = min(max(value, -MOST), MOST)
        return math.log(value, self.base) if self.base else value

    def ticks(self) -> list[float]:
        """Round values, about :data:`TICKS` of them."""
        if self.base:
            low = math.ceil(self._linear(self.low) - 1e-9)
            high = math.floor(self._linear(self.high) + 1e-9)
            every = max(1, math.ceil((high - low) / TICKS))
            powers = [float(self.base) ** n for n in range(low, high + 1, every)]
            if len(powers) > 1:
                return powers
        return _round_values(self.low, self.high)

    def label(self, value: float) -> str:
        """A tick in words."""
        return power_of_two(value) if self.base == 2 else number(value)


def steps_axis(steps: Sequence[int]) -> Axis:
    """The x axis of curves over steps."""
    low, high = float(min(steps)), float(max(steps))
    pad = max(0.5, 0.01 * (high - low))
    return Axis(low - pad, high + pad, LEFT, WIDTH - RIGHT)


def values_axis(values: Sequence[float], base: int, top: float, bottom: float) -> Axis:
    """The y axis of curves, with a little room above and below. A logarithmic one needs values
    above zero; without them it is linear."""
    if not values:
        return Axis(0.0, 1.0, bottom, top)
    low, high = max(min(values), -MOST), min(max(values), MOST)
    if base and low > 0:
        return Axis(low / 1.1, high * 1.1, bottom, top, base)
    pad = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return Axis(low - pad, high + pad, bottom, top)


def drawn_x(axis: Axis, bottom: float, title: str) -> Markup:
    """Whole steps below the plot, and what they count."""
    found = [t for t in axis.ticks() if float(t).is_integer()]
    labels = [
        element("text", f"{t:,.0f}", x=axis.place(t), y=bottom + 15, text_anchor="middle")
        for t in found
    ]
    name = element(
        "text", title, x=(axis.start + axis.end) / 2, y=bottom + 32, text_anchor="middle"
    )
    return element("g", element("g", *labels, class_="xticks"), name, class_="words")


def drawn_y(axis: Axis, left: float, right: float, title: str) -> Markup:
    """Lines across the plot with their values, and what they measure."""
    parts = []
    for tick in axis.ticks():
        y = axis.place(tick)
        parts.append(element("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(element("text", axis.label(tick), x=left - 6, y=y + 4, text_anchor="end"))
    middle = (axis.start + axis.end) / 2
    name = element(
        "text", title, transform=f"translate(13,{middle:.6g}) rotate(-90)", text_anchor="middle"
    )
    return element("g", element("g", *parts, class_="yticks"), name, class_="words")


def _round_values(low: float, high: float) -> list[float]:
    rough = (high - low) / TICKS
    if not rough > 0 or not math.isfinite(rough):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((s * power for s in _STEPS if s * power >= rough), 10 * power)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)][: 4 * TICKS]
