"""NumPy's ``float16``, heard where a program looks it up: ``x.astype(np.float16)`` calls nothing of
torch's, and methods of arrays cannot be replaced.

A dtype that is named by a text ("float16", "e") is not heard.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

NAMES = ("float16", "half")
Answer = Callable[[Any, FrameType], Any]
_ANSWERS: list[Answer] = []  # the newest last


@contextlib.contextmanager
def float16_looked_up(answer: Answer) -> Iterator[None]:
    """While entered, ``numpy.float16`` is what ``answer`` makes of it, of the type and the frame
    that looks it up. Nothing happens where NumPy is not imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    _ANSWERS.append(answer)
    held = {name: vars(numpy).pop(name) for name in NAMES if name in vars(numpy)}
    if held:  # the first to listen
        half, others = held[NAMES[0]], numpy.__getattr__

        def __getattr__(name: str) -> Any:  # noqa: N807
            if name not in NAMES:
                return others(name)
            value = half
            for one in tuple(_ANSWERS):
                value = one(value, sys._getframe(1))
            return value

        numpy.__getattr__ = __getattr__  # type: ignore[method-assign]  # a module's own
    try:
        yield
    finally:
        _ANSWERS.remove(answer)
        if held:
            numpy.__getattr__ = others  # type: ignore[method-assign]
            vars(numpy).update(held)
