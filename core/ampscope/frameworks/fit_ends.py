"""How a framework's ``fit`` ends: whose end tells of it, and what to say of an exception."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable


def first_words(error: BaseException) -> str:
    """Of a message; TensorFlow's begins with where a graph was traced, which is not what failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Graph execution error"):
        lines = [
            x for x in lines[1:] if re.match(r"[\w.]+(Error|Exception|Interrupt): ", x)
        ] or lines
    words = lines[0][:300].rstrip(".:") if lines else ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def on_leaving(kind: type, left: Callable[[BaseException | None], None]) -> Callable[[], object]:
    """Have ``left`` called when the ``fit`` that calls us is over, whatever ended it, with the
    exception if it can be had. The answer calls that off.

    The list of callbacks, a ``kind``, lives as long as ``fit`` does, and nobody else holds it.
    """
    callbacks = _calling(kind)
    if callbacks is None:
        return lambda: None
    before = _errors()  # of an earlier cell of a notebook, or of what is being handled now
    return weakref.finalize(callbacks, lambda: left(_new_error(before))).detach


def _calling(kind: type) -> object:
    """The ``kind`` that calls us, found among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    return None


def _errors() -> list[BaseException]:
    """The one that is being handled, and the last that nobody handled."""
    found = sys.exc_info()[1], getattr(sys, "last_value", None)
    return [error for error in found if isinstance(error, BaseException)]


def _new_error(before: list[BaseException]) -> BaseException | None:
    return next((e for e in _errors() if not any(e is old for old in before)), None)
