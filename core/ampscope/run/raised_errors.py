"""Errors out of a model's forward pass or a backward pass, whether or not the script lets them
through: many training loops catch what they take for a lack of memory, and lose every step to it in
silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampscope.capture.script.source_lines import SourceLines, line_name
from ampscope.run import script_errors

MAX_TEXT = 2_000
# A caught error is told with its text where it comes again and again; once is a way to try things.
MIN_CAUGHT, CAUGHT_SHARE = 3, 0.05  # of the attempted steps and the errors together
# On the error itself, because ids are used again: path of the innermost module; that it is counted.
_MARK, _COUNTED = "_ampscope_module", "_ampscope_counted"


class RaisedErrors:
    """Counts them, and keeps the first as fields of ``Outcome``; ``attempts`` counts steps."""

    def __init__(self, lines: SourceLines, attempts: Callable[[], int]) -> None:
        self.count = 0
        self._lines = lines
        self._attempts = attempts
        self._first: dict[str, Any] = {}

    def left_module(self, error: Exception, path: str, *, is_outermost: bool) -> None:
        """``error`` leaves the forward pass of the module at ``path``, innermost first."""
        error.__dict__.setdefault(_MARK, path)
        if is_outermost:
            self.raised(error)

    def raised(self, error: Exception) -> None:
        """``error`` goes to the script's own code."""
        path = error.__dict__.setdefault(_MARK, "")
        memory = isinstance(error, torch.OutOfMemoryError)
        if memory or not isinstance(error, RuntimeError) or _COUNTED in error.__dict__:
            return
        error.__dict__[_COUNTED] = True
        self.count += 1
        if not self._first:
            place, function = script_errors.place_of(error, self._lines)
            self._first = {
                "error_type": type(error).__name__,
                "error_text": str(error)[:MAX_TEXT],
                # The script's own frames may all lie above: the error has not come to them yet.
                "error_line": line_name(place if place[0] else self._lines.where()),
                "error_in_function": function,
                "error_module": path,
                "error_attempt": self._attempts(),
            }

    def module_of(self, error: BaseException) -> str:
        """Path of the innermost module in whose forward ``error`` was raised, or ""."""
        return str(error.__dict__.get(_MARK, ""))

    def caught(self) -> dict[str, Any]:
        """Their number, and where they come often the first, as fields of an outcome that no error
        ended."""
        often = self.count >= max(MIN_CAUGHT, CAUGHT_SHARE * (self._attempts() + self.count))
        return {**(self._first if often else {}), "errors_caught": self.count}
