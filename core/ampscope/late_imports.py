"""Modules that ampscope loads in the midst of a script, as a fresh interpreter would load them.

A script owns its process. It may have put a function of its own in the place of ``print`` or
``__import__``, made errors of warnings, emptied ``sys.path`` or gone to another folder: libraries
that look such things up fail to import then (numba takes a builtin by its name from the module that
it says it is of).
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.util
import io
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from types import BuiltinFunctionType, ModuleType
from typing import Any

REPLACED = ("print", "open", "input", "__import__", "exec", "eval", "compile")
_HUSHED: Any = ("ignore", None, Warning, None, 0)
_real = {name: getattr(builtins, name) for name in REPLACED}  # once known to be Python's own
_path = [os.path.abspath(entry) for entry in sys.path]  # "" is the folder that was current
_failed: dict[str, str] = {}
_lock = threading.Lock()  # of _inside and _before
_inside: list[int] = []  # the threads in real_builtins, each as often as it has entered
_before: dict[str, Any] = {}  # what the script had put there


def late_import(name: str) -> ModuleType:
    """The module of that name. Raises ImportError, whatever its import raised; what has failed once
    is not tried again."""
    found = sys.modules.get(name)
    if found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False):
        return found
    if name in _failed:
        raise ImportError(_failed[name])
    try:
        with real_builtins(), _no_warning_is_an_error(), _whole_path():
            return importlib.import_module(name)
    except Exception as error:
        _failed[name] = f"{type(error).__name__}: {error}"
        raise ImportError(_failed[name]) from error


def is_installed(name: str) -> bool:
    """Whether the package of that name can be found."""
    with real_builtins(), _whole_path():
        return importlib.util.find_spec(name) is not None


@contextlib.contextmanager
def real_builtins() -> Iterator[None]:
    """Python's own functions are in :mod:`builtins` inside, for every thread; then what was, as
    soon as no thread is inside."""
    with _lock:
        _look_for_real()
        now = {name: vars(builtins)[name] for name in _real}
        _before.update({name: one for name, one in now.items() if one is not _real[name]})
        vars(builtins).update(_real)
        _inside.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _inside.remove(threading.get_ident())
            _put_back()


def _put_back() -> None:
    if not _inside:
        vars(builtins).update(_before)
        _before.clear()


def _after_fork() -> None:
    """Threads that held the lock or were inside are none of the child's."""
    _lock._at_fork_reinit()  # type: ignore[attr-defined]  # as Python's own modules do
    _inside[:] = [thread for thread in _inside if thread == threading.get_ident()]
    _put_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _look_for_real() -> None:
    """A script may have replaced some before ampscope was imported. Its own function nearly always
    calls Python's, which is alive then."""
    missing = {name for name, one in _real.items() if type(one) is not BuiltinFunctionType}
    if not missing:
        return
    for one in gc.get_objects():
        if type(one) is not BuiltinFunctionType or one.__name__ not in missing:
            continue
        if one.__self__ is builtins or one is io.open:
            _real[one.__name__] = one
    for name in missing:  # where it is gone, what is there now
        if type(_real[name]) is not BuiltinFunctionType:
            del _real[name]


@contextlib.contextmanager
def _no_warning_is_an_error() -> Iterator[None]:
    # Not by warnings.catch_warnings, which makes Python forget what it has warned of once.
    filters: Any = warnings.filters
    is_needed = any(action == "error" for action, *_ in filters)
    if is_needed:
        filters.insert(0, _HUSHED)
    try:
        yield
    finally:
        if is_needed and _HUSHED in filters:
            filters.remove(_HUSHED)


@contextlib.contextmanager
def _whole_path() -> Iterator[None]:
    """What the script took off ``sys.path`` is looked at after what it has left there."""
    added = [entry for entry in _path if entry not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        if added and sys.path[-len(added) :] == added:
            del sys.path[-len(added) :]
