"""The ops of each step, kept once: steps mostly run the same."""

from __future__ import annotations

from collections.abc import Iterable

from ampscope.records import OpRecord


class OpSets:
    """:meth:`add` in a step, :meth:`end_step` at its end, :meth:`take` what is new."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[OpRecord, ...], int] = {}
        self._new: list[tuple[int, tuple[OpRecord, ...]]] = []
        self._current: int | None = None

    def add(self, ops: Iterable[OpRecord]) -> None:
        """All ops of the step that is under way."""
        found = tuple(sorted(ops, key=lambda op: (op.module, op.phase, op.op, op.inputs)))
        if found and found not in self._numbers:
            self._numbers[found] = len(self._numbers)
            self._new.append((self._numbers[found], found))
        self._current = self._numbers.get(found)

    def end_step(self) -> int | None:
        """Number of the step's set; None where its ops were not looked at."""
        number, self._current = self._current, None
        return number

    def take(self) -> list[tuple[int, tuple[OpRecord, ...]]]:
        """Sets that came since the last call."""
        taken, self._new = self._new, []
        return taken
