"""SIGINT, SIGTERM and SIGHUP end the command line with one sentence, at any moment.

A signal raises :class:`Stopped` in the main thread, so that every ``with`` on the way out ends what
it has started. Where that would leave something half done (a child that was started and is not yet
known, cleaning up), :func:`deferred` keeps it back until the block has ended. Before the command
has begun and after it has ended there is nothing to clean up.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_STOPPED = 130  # the shell's own status for Ctrl-C
SENTENCE = "ampscope: Stopped. What was recorded is kept.\n"
AGAIN_S = 0.05


class Stopped(KeyboardInterrupt):
    """A signal asked this command to stop."""


class TimeIsUp(Stopped):
    """What :func:`within` allowed has passed."""


class _State:
    has_begun = False
    depth = 0  # of deferred blocks
    waiting = 0  # a signal that came meanwhile


_state = _State()


def install() -> None:
    """Handle the signals from here on. One that is ignored (nohup, a shell's background job) stays
    ignored."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stopped)
    sys.unraisablehook = _unraisable


@contextlib.contextmanager
def command() -> Iterator[None]:
    """Around a command: a signal within ends it with the sentence."""
    _state.has_begun = True
    try:
        yield
    except KeyboardInterrupt:
        end()


def end() -> NoReturn:
    """Say the sentence and end with its status."""
    ignore()
    sys.stdout.flush()
    os.write(2, SENTENCE.encode())
    sys.exit(EXIT_STOPPED)


def ignore() -> None:
    """From here on there is nothing to stop any more."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) is _stopped:
                signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def deferred(*, again: bool = True) -> Iterator[None]:
    """A signal within raises when the block has ended; without ``again`` it is dropped, for the
    last block of a command that ends anyway."""
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        if _state.waiting and not _state.depth:
            number, _state.waiting = _state.waiting, 0
            if again:
                raise _asked_by(number)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """A block that :class:`TimeIsUp` ends after ``seconds``, as a signal would."""
    if math.isinf(seconds):
        yield
        return
    before = signal.signal(signal.SIGALRM, _stopped)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _asked_by(number: int) -> Stopped:
    return TimeIsUp() if number == signal.SIGALRM else Stopped()


def _stopped(number: int, frame: FrameType | None) -> None:
    if not _state.has_begun:
        os.write(2, SENTENCE.encode())
        os._exit(EXIT_STOPPED)
    if _state.depth:
        _state.waiting = number
        return
    raise _asked_by(number)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Python drops what is raised where an object is deleted: ask once more a moment later."""
    if not isinstance(unraisable.exc_value, Stopped):
        sys.__unraisablehook__(unraisable)
        return
    again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()
