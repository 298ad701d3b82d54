"""Names by the order in which things are met: "optimizer0", "optimizer1"."""

from __future__ import annotations

from typing import Any


class Numbering:
    """Of one kind. What it has named stays alive, so that no other thing takes over an id."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.things: list[Any] = []
        self._names: dict[int, str] = {}

    def name(self, thing: Any) -> str:
        """Always the same for the same object."""
        if id(thing) not in self._names:
            self._names[id(thing)] = f"{self.kind}{len(self.things)}"
            self.things.append(thing)
        return self._names[id(thing)]
