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
from ampscope.run.script_ranks import is_helper


class Processes:
    """Counts the processes that were started while :meth:`watching` and that may train."""

    def __init__(self, on_fork: Callable[[], None]) -> None:
        self.owner = os.getpid()
        self.started = 0
        self._on_fork = on_fork
        self._counting = True  # a fork that is made now counts by itself

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

    def forked(self) -> None:
        """The script's process was forked, by multiprocessing or by the script itself."""
        self.started += self._counting

    def _counted(self, original: Any) -> Any:
        @functools.wraps(original)
        def start(process: Any) -> None:
            self.started += not is_helper(process)
            self._counting, before = False, self._counting
            try:
                original(process)
            finally:
                self._counting = before

        return start


_current: list[Processes] = []


def _in_child() -> None:
    for processes in _current:
        processes._on_fork()


def _in_parent() -> None:
    for processes in _current:
        processes.forked()


# Cannot be taken back; without a script that runs, there is nothing to do in it.
os.register_at_fork(after_in_child=_in_child, after_in_parent=_in_parent)
