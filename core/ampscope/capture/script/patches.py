"""Replace attributes of classes and modules, and put every one of them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """A stack of replaced attributes; :meth:`undo` restores them in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``make(original)``."""
        original = getattr(owner, name)
        own = vars(owner).get(name, _MISSING)  # an inherited one is deleted again, not copied
        self._undo.append((owner, name, own))
        setattr(owner, name, make(original))

    def undo(self) -> None:
        """Put every attribute back, the last one first."""
        while self._undo:
            owner, name, own = self._undo.pop()
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
