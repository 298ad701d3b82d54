"""Execute a script as ``__main__``, from the text that was read once for all runs of a diagnosis.

A script may delete or rewrite its own file, and a person may edit it while a diagnosis is under
way; every run must still judge the same text. So the process that forks the runs reads it once
(:func:`read_once`), and source lines are looked up in that text as well.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import linecache
import random
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ampscope.capture.script.patches import Patches

SEED = 20240229
_texts: dict[str, bytes] = {}  # path -> the file as it was at first


def read_once(path: str) -> None:
    """Keep the text of ``path`` for :func:`execute`; a file that cannot be read is left to it."""
    with contextlib.suppress(OSError):
        _texts[path] = Path(path).read_bytes()


def module_of(workload: str) -> str:
    """``package.module`` of a workload ``-m package.module``; "" of a file."""
    return workload.removeprefix("-m ").strip() if workload.startswith("-m ") else ""


def folder_of(workload: str) -> str:
    """What Python puts first on the import path: the script's folder, or the current one."""
    return str(Path.cwd() if module_of(workload) else Path(workload).resolve().parent)


def execute(workload: str) -> None:
    """Run a file or ``-m package.module`` to its end; raises whatever it raises."""
    if module := module_of(workload):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    text = _texts[workload] if workload in _texts else Path(workload).read_bytes()
    with contextlib.suppress(UnicodeDecodeError, SyntaxError):
        lines = importlib.util.decode_source(text).splitlines(keepends=True)
        # Without a time of change, linecache keeps the entry also when the file is gone.
        linecache.cache[workload] = (len(text), None, lines, workload)
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=workload,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", workload),
        __cached__=None,
        __annotations__={},
    )
    sys.modules["__main__"] = main  # pickling, and children that are spawned, look it up there
    exec(compile(text, workload, "exec", dont_inherit=True), main.__dict__)


@dataclass(slots=True)
class Stage:
    """What the script did with its surroundings."""

    compiles: bool = False  # it called torch.compile


@contextlib.contextmanager
def stage(workload: str, args: tuple[str, ...]) -> Iterator[Stage]:
    """What a script finds at its start: arguments, import path, seeds; all put back on exit.

    The seeds of torch, NumPy and ``random`` are set so that a script without seeds repeats itself
    from run to run. ``torch.compile`` gives back the module as it is, because a compiled graph
    hides its ops.
    """
    found = Stage()
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    disabled = torch._dynamo.config.disable
    patches = Patches()
    patches.replace(torch, "compile", lambda original: _noted(original, found))
    torch._dynamo.config.disable = True
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    sys.argv = [module_of(workload) or workload, *args]
    if not sys.flags.safe_path:
        sys.path[0] = folder_of(workload)  # in place of what this process was started with
    try:
        yield found
    finally:
        patches.undo()
        sys.argv, sys.path[:], sys.modules["__main__"] = before
        torch._dynamo.config.disable = disabled


def _noted(original: Any, found: Stage) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found.compiles = True
        return original(*args, **kwargs)

    return wrapper
