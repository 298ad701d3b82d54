"""What padding gains a layer: the time of its products that miss by a dimension, and of the same
products with that dimension enlarged, both measured.

A layer's forward and backward products share the dimension (a Linear's output is n, then k, then m
or n again), so a change of it is looked for in all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.records import Padded, Product, Timing

WORTH = 1.05  # what is gained less than this is within the spread of timings


@dataclass(frozen=True, slots=True)
class PaddingGain:
    """One change of one layer; seconds a step, over all products of the layer that it touches."""

    module: str
    changes: tuple[tuple[int, int], ...]  # (size, padded size), in rising order
    products: int  # calls a step
    seconds: float
    padded_s: float
    low: float  # gain with the quartiles that lie nearer, and
    high: float  # with those that lie further apart

    @property
    def gain(self) -> float:
        """Times as fast with padding; below 1 it costs."""
        return self.seconds / self.padded_s

    @property
    def is_worth_it(self) -> bool:
        """More than the spread of its timings."""
        return self.low > WORTH


def padding_gains(products: Sequence[Product]) -> list[PaddingGain]:
    """Most time saved first."""
    found: dict[tuple[str, tuple[tuple[int, int], ...]], list[tuple[int, Timing, Timing]]]
    found = defaultdict(list)
    for product in products:
        for padded in product.padded:
            for place in product.places:
                if product.timing is not None:
                    key = (place.module, _changes(padded))
                    found[key].append((place.count, product.timing, padded.timing))
    gains = [_gain(module, changes, timings) for (module, changes), timings in found.items()]
    return sorted(gains, key=lambda g: g.padded_s - g.seconds)


def best_gain(products: Sequence[Product]) -> PaddingGain | None:
    """The one that saves most time beyond doubt; None where nothing does."""
    return next((gain for gain in padding_gains(products) if gain.is_worth_it), None)


def _changes(padded: Padded) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(set(padded.changes)))


def _gain(
    module: str,
    changes: tuple[tuple[int, int], ...],
    timings: Sequence[tuple[int, Timing, Timing]],
) -> PaddingGain:
    def total(of: int, field: str) -> float:
        return float(sum(entry[0] * getattr(entry[of], field) for entry in timings))

    return PaddingGain(
        module=module,
        changes=changes,
        products=sum(count for count, _, _ in timings),
        seconds=total(1, "median_s"),
        padded_s=total(2, "median_s"),
        low=total(1, "low_s") / total(2, "high_s"),
        high=total(1, "high_s") / total(2, "low_s"),
    )
