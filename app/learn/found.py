"""Look-ups in a lesson's results by name and series. A missing one is a fault of the lesson:
LookupError."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.records import Curve, Reading, Result


def reading(results: Sequence[Result], name: str, series: str) -> float:
    """The number of that name and series."""
    for one in results:
        if isinstance(one, Reading) and (one.name, one.series) == (name, series):
            return one.value
    raise LookupError(f"no reading {name!r} of {series!r}")


def curve(results: Sequence[Result], name: str, series: str) -> Curve:
    """The curve of that name and series."""
    for one in results:
        if isinstance(one, Curve) and (one.name, one.series) == (name, series):
            return one
    raise LookupError(f"no curve {name!r} of {series!r}")


def curves(results: Sequence[Result], name: str) -> list[Curve]:
    """Every series of that name, in the order in which they were measured."""
    return [one for one in results if isinstance(one, Curve) and one.name == name]
