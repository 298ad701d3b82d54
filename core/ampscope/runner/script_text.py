"""The text of a script: read once for all runs of a diagnosis, and executed as ``__main__``.

A script may delete or rewrite its own file, and a person may edit it while a diagnosis is under
way; every run must still judge the same text. So the process that forks the runs reads it once
(:func:`read_once`), and source lines are looked up in that text as well. Imports no framework.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import itertools
import linecache
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

SEED = 20240229
_texts: dict[str, bytes] = {}  # path -> the file as it was at first


def read_once(path: str) -> None:
    """Keep the text of ``path`` for :func:`execute`; a file that cannot be read is left to it."""
    with contextlib.suppress(OSError):
        _texts[path] = Path(path).read_bytes()


def also_at(path: str, other: str) -> None:
    """The text of ``path`` is that of ``other`` too, a copy of the file."""
    if path in _texts:
        _texts[other] = _texts[path]


def module_of(workload: str) -> str:
    """``package.module`` of a workload ``-m package.module``; "" of a file."""
    return workload.removeprefix("-m ").strip() if workload.startswith("-m ") else ""


def folder_of(workload: str) -> str:
    """What Python puts first on the import path: the script's folder, or the current one."""
    return str(Path.cwd() if module_of(workload) else Path(workload).resolve().parent)


def put_folder_first(workload: str) -> None:
    """Give ``sys.path`` the entry that Python gives it for this script, if the user lets it.

    It replaces the entry that this process was started with. With ``-P`` there is none; only
    PYTHONSAFEPATH is the user's own wish that the script have none either.
    """
    if not sys.flags.safe_path:
        sys.path[0] = folder_of(workload)
    elif not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder_of(workload))


_HALF = frozenset({"autocast", "GradScaler", "half", "bfloat16", "float16"})
# What trainers are asked by: ``bf16=True``, ``mixed_precision="fp16"``, ``precision="16-mixed"``.
_ASKED = frozenset(
    {"fp16", "bf16", "float16", "bfloat16", "16-mixed", "bf16-mixed", "16-true", "bf16-true"}
)


def names_half(is_user: Callable[[CodeType], bool]) -> bool:
    """Whether the user's own modules that are imported by now name what torch computes in half
    precision with: it may take part later."""
    for module in list(sys.modules.values()):
        if not issubclass(type(module), ModuleType):  # what a script has put there is not asked
            continue
        file = ModuleType.__getattribute__(module, "__dict__").get("__file__")
        if not isinstance(file, str):
            continue
        with contextlib.suppress(SyntaxError, ValueError):
            if not is_user(compile("", file, "exec")):
                continue
            code = compile("".join(linecache.getlines(file)), file, "exec", dont_inherit=True)
            if any(_HALF & {*one.co_names} or _ASKED & _words(one) for one in _codes(code)):
                return True
    return False


def _words(code: CodeType) -> set[str]:
    """Texts among the constants of ``code``, and names by which it passes arguments."""
    nested = (value for value in code.co_consts if type(value) is tuple)
    constants = itertools.chain(code.co_consts, *nested)
    return {value for value in constants if type(value) is str}


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


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
