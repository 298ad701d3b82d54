"""The ordered log itself: what was called, at which line, and whether another call made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampscope.capture.script.source_lines import SourceLines, line_name
from ampscope.observations import Call

MAX_CALLS = 20_000


class Calls:
    """Appends :class:`Call` records; ``count`` gives the number of attempted optimizer steps."""

    def __init__(self, lines: SourceLines, count: Callable[[], int]) -> None:
        self.records: list[Call] = []
        self.on_raised: Callable[[Exception], None] = lambda error: None  # out of a backward pass
        self._lines = lines
        self._count = count
        self._depth = 0

    @property
    def is_nested(self) -> bool:
        """A watched call is running: what happens now is torch's doing, not the user's."""
        return self._depth > 0

    def line(self) -> str:
        """The user's line that runs now, "train.py:41"."""
        return line_name(self._lines.where())

    def add(self, name: str, **facts: Any) -> None:
        """Append one call; ``facts`` are fields of :class:`Call`."""
        if len(self.records) >= MAX_CALLS:
            return
        self.records.append(
            Call(
                seq=len(self.records),
                attempt=self._count(),
                name=name,
                nested=self.is_nested,
                line=self.line(),
                **facts,
            )
        )

    def inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; what it calls in turn is nested."""
        self._depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._depth -= 1
