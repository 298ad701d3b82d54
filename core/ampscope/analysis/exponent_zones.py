"""Which exponents a chart shows, and where the four zones of a format lie among them."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.formats import NumberFormat

NAMES = ("lost", "subnormal", "normal", "overflow")  # of the zones, from left to right
MARGIN_BINS = 5  # room beside the outermost limit: the words "lost" and "overflow" fit in it


@dataclass(frozen=True, slots=True)
class ExponentRange:
    """Exponents shown, both ends included."""

    lowest: int
    highest: int

    @property
    def width(self) -> int:
        """Number of exponents."""
        return self.highest - self.lowest + 1


def exponent_range(occupied: tuple[int, int] | None, fmt: NumberFormat) -> ExponentRange:
    """Wide enough for the data and for every limit of the format."""
    low, high = fmt.zero_below_exponent - MARGIN_BINS, fmt.max_exponent + MARGIN_BINS
    if occupied is not None:
        low, high = min(low, occupied[0] - 1), max(high, occupied[1] + 1)
    return ExponentRange(low, high)


def zone_spans(fmt: NumberFormat, shown: ExponentRange) -> list[tuple[str, int, int]]:
    """(zone, first exponent, exponent after the last) from left to right within ``shown``."""
    edges = (
        shown.lowest,
        fmt.zero_below_exponent,
        fmt.min_normal_exponent,
        fmt.max_exponent + 1,
        shown.highest + 1,
    )
    return list(zip(NAMES, edges[:-1], edges[1:], strict=True))
