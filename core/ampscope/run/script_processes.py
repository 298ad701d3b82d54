"""Processes that a script starts: they are not watched, and must not write to the run's store.

A forked child inherits every patch and the open store. It keeps the patches, which do no harm, and
loses the watch; what it does is not recorded.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.process
import os
from collections.abc import Callable, Iterator
from typing import Any

from ampscope.capture.script.patches import Patches


class Processes:
    """Counts the processes that were started while :meth:`watching`."""

    def __init__(self, on_fork: Callable[[], None]) -> None:
        self.owner = os.getpid()
        self.started = 0
        self._on_fork = on_fork

    @property
    def is_own(self) -> bool:
        """Whether this is the script's own process and no fork of it."""
        return os.getpid() == self.owner

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count, and switch the watch off in children."""
        patches = Patches()
        patches.replace(multiprocessing.process.BaseProcess, "start", self._counted)
        _current.append(self)
        try:
            yield
        finally:
            _current.remove(self)
            patches.undo()

    def _counted(self, original: Any) -> Any:
        @functools.wraps(original)
        def start(process: Any) -> None:
            self.started += 1
            original(process)

        return start


_current: list[Processes] = []


def _in_child() -> None:
    for processes in _current:
        processes._on_fork()


def _in_parent() -> None:
    for processes in _current:
        processes.started += 1


# Cannot be taken back; without a script that runs, there is nothing to do in it.
os.register_at_fork(after_in_child=_in_child, after_in_parent=_in_parent)
