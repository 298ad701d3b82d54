"""Names for objects that have none: "optimizer0", "scaler1", in the order of first sight."""

from __future__ import annotations

from typing import Any


class Numbering:
    """Numbers objects by identity; keeping them alive keeps their numbers their own."""

    def __init__(self, word: str) -> None:
        self.known: list[Any] = []
        self._word = word

    def name_of(self, thing: object) -> str:
        """The object's name; a new number when it was not seen before."""
        for number, known in enumerate(self.known):
            if known is thing:
                return f"{self._word}{number}"
        self.known.append(thing)
        return f"{self._word}{len(self.known) - 1}"

    def named(self, name: str) -> Any | None:
        """The object of that name; None when there is none."""
        return next((k for n, k in enumerate(self.known) if f"{self._word}{n}" == name), None)
