"""How a ``fit`` ends: whose end tells of it, and what to say of an exception."""

from __future__ import annotations

import re
import sys
from typing import Any

import keras


def first_words(error: BaseException) -> str:
    """Of a message; TensorFlow's begins with where a graph was traced, which is not what failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Graph execution error"):
        lines = [
            x for x in lines[1:] if re.match(r"[\w.]+(Error|Exception|Interrupt): ", x)
        ] or lines
    words = lines[0][:300].rstrip(".:") if lines else ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def callback_list() -> Any:
    """The list of callbacks that calls us, found among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, keras.callbacks.CallbackList):
            return found
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    return None
