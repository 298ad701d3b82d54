"""What goes wrong inside ampscope is not the training's: it ends the watching, with one line.

Every function of a watch that torch or the training calls passes the watch's :class:`Guard`: hooks
on modules, tensors, parameters and optimizers, and what wrappers do before and after the original.
An exception takes everything off, says so once on stderr, and the training goes on as it would
without a watch. While a CUDA graph is recorded nothing is called: what an instrument launched
would become part of the graph, and a wait would end its capture.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import is_capturing
from ampscope.watcher.alarms import Alarm, StopAsked, TrainingStopped

P = ParamSpec("P")
T = TypeVar("T")
MEANT = (Alarm, StopAsked, TrainingStopped)  # that the caller's policy asks for
MOST = 300  # characters of an error


class Guard:
    """``gave_up`` takes everything off and gets the reason. ``captured`` is called once, when
    something is left out because a CUDA graph is recorded."""

    def __init__(
        self, gave_up: Callable[[str], None], captured: Callable[[], None] | None = None
    ) -> None:
        self.is_off = False  # nothing is watched any more
        self._gave_up = gave_up
        self._captured = captured

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """``function``'s result; None when it raised, when the watching has ended, or when a CUDA
        graph is recorded."""
        if self.is_off:
            return None
        try:
            if is_capturing():
                captured, self._captured = self._captured, None
                if captured is not None:
                    captured()
                return None
            with own_ops():
                return function(*args, **kwargs)
        except MEANT:
            raise
        except Exception as error:  # of any kind: it would end the training
            self._failed(error)
            return None

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as torch may call it."""
        return functools.partial(self.call, function)

    def _failed(self, error: Exception) -> None:
        self.is_off = True
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MOST]
        reason = f"ampscope stopped watching: {reason}"
        with contextlib.suppress(Exception):  # stderr may be closed
            print(reason, file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            self._gave_up(reason)
