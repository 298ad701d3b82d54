"""Run a user's workload factory, and say in one sentence what went wrong with it.

A file is imported from where it lies, with its folder on `sys.path` until the workload is built, so
it can import its neighbours; it is registered under a name of its own, so that a file called gpt.py
or random.py shadows nothing. For a module the current folder serves as that folder. torch, NumPy
and `random` are seeded before the import and again before the call.

Whatever the user's code raises becomes a BadInput that names the exception and the line; the
exception itself is its `__cause__`, with the whole traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from ampscope.errors import AmpscopeError, BadInput
from ampscope.workloads.protocol import Workload

_NUMPY_SEEDS = 2**32  # np.random.seed takes 0 to 2^32 - 1
_TEXT_LENGTH = 300  # characters of an exception's own text; the whole is in __cause__


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Put `folder` first on `sys.path` for the time of the block."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:  # the user's code may have changed the list
            sys.path.remove(entry)


def import_source(source: Path | str, seed: int) -> ModuleType:
    """Import a file (always afresh) or a module by its name."""
    _seed_all(seed)  # a module may draw its data while it is imported
    if isinstance(source, Path):
        return _import_file(source)
    try:
        return importlib.import_module(source)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}."):
            raise BadInput(
                f"There is no module {error.name!r} to take the workload {source!r} from. It was "
                f"looked for in {Path.cwd()} and among the installed packages."
            ) from error
        raise _failed(f"Importing {source}", error, None) from error


def call_factory(module: ModuleType, function: str, size: str, seed: int) -> Workload:
    """The workload that the factory builds. Raises BadInput when it builds something else."""
    workload = built(module, function, size, seed)
    if not isinstance(workload, Workload):
        where = f"{function!r} in {module.__file__ or module.__name__}"
        got = "None" if workload is None else f"an object of type {type(workload).__name__}"
        raise BadInput(f"{where} must return an ampscope.Workload, but it returned {got}.")
    return workload


def built(module: ModuleType, function: str, size: str, seed: int) -> object:
    """Call the factory with those of `seed` and `size` that it takes; return what it built."""
    file = module.__file__ or module.__name__
    where = f"{function!r} in {file}"
    factory = _find(module, function, file)
    arguments = _arguments(factory, {"seed": seed, "size": size}, where)
    _seed_all(seed)
    try:
        return factory(**arguments)
    except (Exception, SystemExit) as error:
        raise _failed(where, error, file) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise BadInput(f"The workload file {path} {what} (current folder: {Path.cwd()}).")
    path = path.resolve()
    name = f"ampscope_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # only for a name that does not end in .py
        raise BadInput(f"Python cannot import {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise _failed(f"Importing {path}", error, str(path)) from error
    return module


def _find(module: ModuleType, function: str, file: str) -> Callable[..., object]:
    advice = f"Define `def {function}(seed: int) -> Workload:` in it."
    factory: object = getattr(module, function, None)
    if factory is None:
        raise BadInput(f"{file} has no function {function!r}. {advice}")
    if not callable(factory):
        kind = type(factory).__name__
        raise BadInput(f"{function!r} in {file} is not a function but of type {kind}. {advice}")
    return factory


def _arguments(
    factory: Callable[..., object], offered: dict[str, int | str], where: str
) -> dict[str, int | str]:
    try:
        signature = inspect.signature(factory)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        names = [name for name in offered if takes_all or name in signature.parameters]
        taken = {name: offered[name] for name in names}
        signature.bind(**taken)
    except (TypeError, ValueError) as error:  # ValueError: a built-in without a signature
        raise BadInput(
            f"{where} is called with `seed` (and with `size`, if it has such a parameter), which "
            f"does not fit: {error}."
        ) from error
    return taken


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    random.seed(seed)


def _failed(what: str, error: BaseException, file: str | None) -> BadInput:
    """One sentence: what failed, at which line, with the exception's type and its own text."""
    if isinstance(error, AmpscopeError):  # a Workload that refused its parts; a sentence already
        return BadInput(f"{what} failed{_line(error, file)}: {error}")
    if isinstance(error, SystemExit):
        return BadInput(f"{what} ended the program{_line(error, file)} (exit status {error.code}).")
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = textwrap.shorten(text, _TEXT_LENGTH, placeholder=" …")  # one line; torch's can be pages
    return BadInput(f"{what} raised {type(error).__name__}{_line(error, file)}: {text}")


def _line(error: BaseException, file: str | None) -> str:
    """The innermost line of the user's file that the error passed through, else the last one."""
    if isinstance(error, SyntaxError) and error.filename:
        own = error.filename == file
        return f" at line {error.lineno}" + ("" if own else f" of {error.filename}")
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if frame.filename == file]
    if own_frames:
        return f" at line {own_frames[-1].lineno}"
    return f" at line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
