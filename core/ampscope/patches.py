"""Replace attributes of classes and modules, and put every one of them back.

Several may replace the same attribute and leave in any order, from any thread: the wrappers of an
attribute are kept in one list, put around the original anew whenever one comes or goes, and the
original is put back with the last. Setting the attribute is one step, so a call in another thread
gets either the old wrappers or the new ones; a wrapper that is left inside a running call passes
it on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

_MISSING = object()
_PASSES_ON = "_ampscope_passes_on"
_Make = Callable[[Any], Any]
_Key = tuple[int, str]


def passes_on(wrapper: _Make) -> _Make:
    """Mark a wrapper, made with functools.wraps, that only listens: see :func:`within`."""
    setattr(wrapper, _PASSES_ON, True)
    return wrapper


def within(function: Any) -> Any:
    """What ``function`` is a listening wrapper of, else itself. torch hands a mode what it finds
    under a method's name, and tables of functions hold the original."""
    while getattr(function, _PASSES_ON, False):
        function = function.__wrapped__
    return function


@dataclass(slots=True)
class _Replaced:
    """An attribute that is replaced at present."""

    owner: Any
    name: str
    original: Any  # what a lookup gave
    own: Any  # what the owner itself held; an inherited one is deleted again, not copied
    makes: list[_Make] = field(default_factory=list)

    def apply(self) -> None:
        """Set the attribute to the original inside all wrappers, or put it back."""
        if self.makes:
            value = self.original
            for make in () if (id(self.owner), self.name) in _UNPATCHED else self.makes:
                value = make(value)
            setattr(self.owner, self.name, value)
        elif self.own is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.own)


_REPLACED: dict[_Key, _Replaced] = {}
_UNPATCHED: dict[_Key, int] = {}  # how many are inside `unpatched`
_lock = threading.RLock()


@contextlib.contextmanager
def unpatched(owner: Any, name: str) -> Iterator[None]:
    """``owner.name`` is the original inside, in every thread; for what reads Python code and must
    not find a wrapper there. The wrappers come back when the last one has left."""
    key = (id(owner), name)
    _count_unpatched(key, 1)
    try:
        yield
    finally:
        _count_unpatched(key, -1)


def _count_unpatched(key: _Key, change: int) -> None:
    with _lock:
        _UNPATCHED[key] = _UNPATCHED.get(key, 0) + change
        if not _UNPATCHED[key]:
            del _UNPATCHED[key]
        if key in _REPLACED:
            _REPLACED[key].apply()


class Patches:
    """Replaced attributes; :meth:`undo`, or the end of a ``with`` block, takes this one's wrappers
    off."""

    def __init__(self) -> None:
        self._mine: list[tuple[_Key, _Make]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """A call of ``owner.name`` becomes ``call(original, *args, **kwargs)``."""

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return call(original, *args, **kwargs)

            return wrapper

        self.replace(owner, name, make)

    def replace(self, owner: Any, name: str, make: _Make) -> None:
        """Set ``owner.name`` to ``make(original)``. ``make`` may be called again later."""
        key = (id(owner), name)
        with _lock:
            if key not in _REPLACED:
                own = vars(owner).get(name, _MISSING)
                _REPLACED[key] = _Replaced(owner, name, getattr(owner, name), own)
            replaced = _REPLACED[key]
            replaced.makes.append(make)
            try:
                replaced.apply()
            except BaseException:  # nothing was set
                replaced.makes.remove(make)
                if not replaced.makes:
                    del _REPLACED[key]
                raise
            self._mine.append((key, make))

    def undo(self) -> None:
        """Take the wrappers off, the last one first."""
        with _lock:
            while self._mine:
                key, make = self._mine.pop()
                replaced = _REPLACED[key]
                replaced.makes.remove(make)
                replaced.apply()
                if not replaced.makes:
                    del _REPLACED[key]
