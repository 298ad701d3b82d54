"""Replacing attributes of Paddle for a while, and putting each back.

with replaced([(GradScaler, "step", mine), …]):
    …
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Replacement = tuple[Any, str, Any]  # owner, attribute, what takes its place


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Set each attribute; on exit the owners hold exactly what they held themselves before."""
    done: list[tuple[Any, str, bool, Any]] = []
    try:
        for owner, name, mine in replacements:
            own = name in vars(owner)
            done.append((owner, name, own, vars(owner).get(name)))
            setattr(owner, name, mine)
        yield
    finally:
        for owner, name, own, before in reversed(done):
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)


def names_of(function: Callable[..., Any]) -> Iterator[tuple[Any, str]]:
    """Every module of Paddle that holds ``function``, and under which name."""
    for key, module in list(sys.modules.items()):
        if key.split(".")[0] == "paddle" and module is not None:
            for name, value in list(vars(module).items()):
                if value is function:
                    yield module, name


def subclasses(root: type) -> Iterator[type]:
    """``root`` and all classes below it, each once."""
    seen: set[type] = set()
    pending = [root]
    while pending:
        found = pending.pop()
        if found not in seen:
            seen.add(found)
            pending += found.__subclasses__()
            yield found
