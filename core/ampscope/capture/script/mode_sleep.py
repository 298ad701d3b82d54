"""A dispatch mode leaves torch's stack while there is nothing for it to see, and comes back.

A mode costs each op several microseconds, also where it does nothing: generating data in small ops
takes twice as long under one. While an op is dispatched its mode is off the stack, and torch puts
it back behind the op, so it cannot leave from there: asked inside an op, it leaves at the next line
of the code that called the op. From outside any op it leaves at once.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ampscope.capture.tensors import in_backward


class ModeSleep:
    """For one ``mode``, which the owner enters before :meth:`ask` or :meth:`leave` and exits after
    :meth:`close`."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        self.is_asleep = False
        self._mode = mode
        self._below: list[TorchDispatchMode] = []  # the modes under it, awake or not
        self._thread = 0
        self._frame: FrameType | None = None  # whose next line is awaited

    def ask(self, frame: FrameType | None) -> None:
        """Leave the stack at the next line of ``frame``; from inside an op. A thread that is traced
        by another, such as a debugger, keeps the mode."""
        if frame is None or frame.f_trace is not None or sys.gettrace() is not None:
            return
        self._frame = frame
        frame.f_trace = self._traced
        sys.settrace(_no_frame)

    def leave(self) -> None:
        """Leave the stack now; from outside any op. Below another mode it stays: waiting for that
        one to leave would cost more than it saves."""
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self._mode:
            _pop_mode()
            self.is_asleep, self._below = True, [*stack[:-1], *_asleep.modes]
            self._thread = threading.get_ident()
            _asleep.modes.append(self._mode)

    def wake(self) -> None:
        """Back to the place on the stack that it had; from outside any op, in the thread in which
        it left. Where other modes are under it by now, and in a backward pass, behind each of whose
        nodes torch puts the stack back, a later call may succeed."""
        self._forget()
        if not self.is_asleep or threading.get_ident() != self._thread or in_backward():
            return
        stack = _get_current_dispatch_mode_stack()
        awake = [mode for mode in self._below if not _is_in(mode, _asleep.modes)]
        depth = len(awake)
        if not all(_is_in(mode, awake) for mode in stack[:depth]) or len(stack) < depth:
            return
        above = [_pop_mode() for _ in stack[depth:]]
        _push_mode(self._mode)
        for mode in reversed(above):
            _push_mode(mode)
        self._woken()

    def close(self) -> None:
        """The owner is about to leave the mode, which then has to be on the stack."""
        self._forget()
        if self.is_asleep:
            _push_mode(self._mode)
            self._woken()

    def _woken(self) -> None:
        self.is_asleep, self._below = False, []
        _asleep.modes = [mode for mode in _asleep.modes if mode is not self._mode]

    def _traced(self, frame: FrameType, event: str, arg: object) -> Any:
        if in_backward() and event != "return":
            return self._traced
        self._forget()
        if not in_backward():
            self.leave()
        return None

    def _forget(self) -> None:
        """Trace nothing any more."""
        frame, self._frame = self._frame, None
        if frame is None:
            return
        if frame.f_trace == self._traced:  # not a debugger's, which came meanwhile
            frame.f_trace = None
        if sys.gettrace() is _no_frame:
            sys.settrace(None)


def _no_frame(frame: FrameType, event: str, arg: object) -> None:
    """What Python asks for each new frame: none is traced."""


class _Asleep(threading.local):
    """The modes of this thread that sleep, in the order in which they left."""

    def __init__(self) -> None:
        self.modes: list[TorchDispatchMode] = []


_asleep = _Asleep()


def _is_in(mode: TorchDispatchMode, modes: list[TorchDispatchMode]) -> bool:
    return any(mode is one for one in modes)
