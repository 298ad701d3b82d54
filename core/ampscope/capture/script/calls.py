"""The ordered log itself: what was called, at which line, and whether another call made it. Objects
are named in the order of first sight: "optimizer0", "scaler1".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampscope.capture.training_events import scale_of
from ampscope.observations import Call
from ampscope.source_lines import SourceLines, line_name

MAX_CALLS = 20_000


class Calls:
    """Appends :class:`Call` records; ``step`` is the number of optimizer steps, skipped ones
    included."""

    def __init__(self, lines: SourceLines) -> None:
        self.records: list[Call] = []
        self.step = 0
        self._most = MAX_CALLS
        self._lines = lines
        self._depth = 0

    @property
    def is_nested(self) -> bool:
        """A watched call is running: what happens now is torch's doing, not the user's."""
        return self._depth > 0

    def begin_anew(self) -> None:
        """Room for as many calls from here on as from the start."""
        self._most = len(self.records) + MAX_CALLS

    def line(self) -> str:
        """The user's line that runs now, "train.py:41"."""
        return line_name(self._lines.where())

    def add(self, name: str, **facts: Any) -> None:
        """Append one call; ``facts`` are fields of :class:`Call`, of which the line is the one
        that runs now unless it is given."""
        if len(self.records) >= self._most:
            return
        if "line" not in facts:
            facts["line"] = self.line()
        self.records.append(
            Call(
                seq=len(self.records),
                step=self.step,
                name=name,
                nested=self.is_nested,
                **facts,
            )
        )

    def enter(self) -> None:
        """A watched call begins; what it calls in turn is nested."""
        self._depth += 1

    def leave(self) -> None:
        """A watched call has ended."""
        self._depth -= 1

    def inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; what it calls in turn is nested."""
        self.enter()
        try:
            return function(*args, **kwargs)
        finally:
            self.leave()

    def gradients(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As :meth:`inside`, for a backward pass: its ops belong to the user's line that runs now,
        in whichever thread autograd runs them."""
        return self._lines.call_for(self.inside, function, *args, **kwargs)

    def scale_of(self, scaler: Any) -> float:
        """The scaler's scale, read without leaving a trace in the log."""
        return float(self.inside(scale_of, scaler))


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
