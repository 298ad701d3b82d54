"""Plain JSON values from a file. A checker takes a value and gives what a field holds, or raises
:class:`Refusal`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ampscope.store.importing.reading import Unreadable
from ampscope.store.importing.refusal import Refusal, quoted, what

Check = Callable[[object], Any]
_NONFINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def rows(value: object) -> list[object]:
    """A list, whatever is in it."""
    if isinstance(value, list):
        return value
    raise _unlike("a list", value)


def fields(value: object) -> dict[str, object]:
    """An object, whatever is in it."""
    if isinstance(value, dict):
        return value
    raise _unlike("an object", value)


def whole(low: int, high: int) -> Check:
    """A whole number between two bounds, both included."""

    def check(value: object) -> int:
        if type(value) is not int:
            raise _unlike("a whole number", value)
        if not low <= value <= high:
            raise Refusal("value", f"{value:,} is not between {low:,} and {high:,}")
        return value

    return check


def text(longest: int) -> Check:
    """A text that can be stored: no longer than that, and without half a character."""

    def check(value: object) -> str:
        if type(value) is not str:
            raise _unlike("a text", value)
        if len(value) > longest:
            raise Refusal("text", f"a text of {len(value):,} characters; {longest:,} are allowed")
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                bad = quoted(value[error.start])
                raise Refusal("text", f"{bad} is half a character") from None
        return value

    return check


def real(low: float, high: float, *, may_be_nonfinite: bool, above: bool = False) -> Check:
    """A number; NaN and infinities are the texts that an export writes. ``above``: ``low`` itself
    is too low."""

    def check(value: object) -> float:
        if type(value) is str and value in _NONFINITE:
            found = _NONFINITE[value]
            if may_be_nonfinite and (found >= low or low == -math.inf):  # NaN is within no bound
                return found
            raise Refusal("value", f"{value} cannot stand here")
        if type(value) not in (int, float):
            raise _unlike("a number", value)
        assert isinstance(value, int | float)
        if not low <= value <= high or (above and value == low):
            raise Refusal("value", f"{value:,} is not between {low:,.6g} and {high:,.6g}")
        return float(value)

    return check


def boolean(value: object) -> bool:
    """true or false, and no number."""
    if type(value) is not bool:
        raise _unlike("true or false", value)
    return value


def one_of(words: tuple[str, ...]) -> Check:
    """One of a few texts."""

    def check(value: object) -> str:
        if type(value) is not str:
            raise _unlike("a text", value)
        if value not in words:
            raise Refusal("value", f"{quoted(value)} is none of {', '.join(words)}")
        return value

    return check


def _unlike(wanted: str, value: object) -> Refusal:
    if isinstance(value, Unreadable):
        return Refusal(value.sort, value.why)
    return Refusal("type", f"{wanted} was expected, not {what(value)}")
