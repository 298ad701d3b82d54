"""The one door for every value that goes into a store or comes out of it.

In: a name that is no valid UTF-8 (a file called ``caf\\xff.py``) is spelled with backslashes, a
text is cut to a length that a page can show. Out: a text is a text, a number is a number within
bounds. What is neither raises :class:`Damaged`, which :mod:`.rows` turns into one sentence.
"""

from __future__ import annotations

import json
import math
from typing import Any

from ampscope.privacy import recorded_text, recorded_traceback

LONGEST = 10_000  # characters: the longest names and messages of real runs have a few hundred
LONGEST_TRACEBACK = 100_000
MOST = 2**63 - 1  # what a column of SQLite holds
LAST_TIME = 253_402_300_799.0  # the year 9999, where the calendar of Python ends
MOST_PID = 2**31 - 1  # larger ones overflow kill(2)
_JSON = {"spec", "machine", "data"}  # columns whose texts went through :func:`storable_parts`
_LONG = {"traceback": LONGEST_TRACEBACK}


class Damaged(ValueError):  # noqa: N818  # says what it found
    """A stored value that nothing of ampscope writes."""


def storable(text: str, longest: int = LONGEST) -> str:
    """``text`` as UTF-8 can hold it, both ends of it where it is too long.

    Half characters, which a name may have in Python and not in UTF-8, are spelled: ``\\udcff``.
    """
    text = recorded_text(text)
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= longest:
        return text
    left_out = len(text) - longest
    half = longest // 2 - 25
    return f"{text[:half]} […{left_out:,} characters left out…] {text[-half:]}"


def storable_parts(value: Any) -> Any:
    """``value``, made of JSON's types, with every text in it storable."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {
            (storable(key) if isinstance(key, str) else key): storable_parts(part)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [storable_parts(part) for part in value]
    return value


def parsed(text_: object) -> Any:
    """The JSON of a column, with every text in it storable. Raises Damaged, or ValueError."""
    if type(text_) is not str:
        raise Damaged(f"{_shown(text_)} stands where JSON belongs")
    try:
        value = json.loads(text_)
    except RecursionError:
        raise Damaged("its lists and objects are nested too deep") from None
    # Half characters are written as escapes; a text that is too long makes the whole so.
    is_plain = len(text_) <= LONGEST and "\\u" not in text_ and text_.isascii()
    return value if is_plain else storable_parts(value)


def to_column(name: str, value: object) -> object:
    """A value of any column on its way in. SQLite stores a REAL NaN as NULL, so NaN is a text."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if not isinstance(value, str) or name in _JSON:
        return value
    if name == "traceback":
        value = recorded_traceback(value)
    return storable(value, _LONG.get(name, LONGEST))


def decoded(raw: bytes) -> str:
    """A text of SQLite's, whatever bytes another program has put there."""
    return raw.decode("utf-8", "backslashreplace")


def text(value: object, longest: int = LONGEST) -> str:
    """A text out of a column."""
    if type(value) is not str:
        raise Damaged(f"{_shown(value)} stands where a text belongs")
    return value if len(value) <= longest and value.isascii() else storable(value, longest)


def whole(value: object, low: int = 0, high: int = MOST) -> int:
    """A whole number out of a column."""
    if type(value) is not int:
        raise Damaged(f"{_shown(value)} stands where a whole number belongs")
    if not low <= value <= high:
        raise Damaged(f"{value} is out of bounds")
    return value


def whole_or_none(value: object, low: int = 0, high: int = MOST) -> int | None:
    """The same; None was not recorded."""
    return None if value is None else whole(value, low, high)


def real(value: object) -> float | None:
    """A number out of a column: finite or not; None was not recorded."""
    if value is None:
        return None
    if value == "nan":
        return math.nan
    if type(value) is not float and type(value) is not int:
        raise Damaged(f"{_shown(value)} stands where a number belongs")
    return float(value)


def moment(value: object) -> float | None:
    """Seconds since 1970 out of a column, which a calendar can show."""
    found = real(value)
    if found is not None and not 0 <= found <= LAST_TIME:
        raise Damaged(f"{found:g} is no time")
    return found


def blob(value: object) -> bytes:
    """Bytes out of a column."""
    if type(value) is not bytes:
        raise Damaged(f"{_shown(value)} stands where bytes belong")
    return value


def _shown(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
