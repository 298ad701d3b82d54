"""The files that a browser may choose: Python files below the folder that the operator named.

A browser sends a text. It is looked up below the folder, symbolic links and ``..`` are resolved
first, and what then lies outside is refused; no code is ever uploaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ampscope.errors import BadInput
from app import permissions

MAX_FILES = 500  # a folder of workloads, not a source tree
MAX_DEPTH = 4
DEFAULT_ENTRY = "build"


def listed(folder: Path | None) -> list[str]:
    """Relative paths, sorted; empty without a folder. Hidden files and folders are left out."""
    if folder is None or not permissions.is_trusted():
        return []
    found: list[str] = []
    for path in _python_files(folder):
        found.append(path.relative_to(folder).as_posix())
        if len(found) == MAX_FILES:
            break
    return sorted(found)


def chosen(folder: Path | None, relative: str, entry: str = DEFAULT_ENTRY) -> str:
    """The workload as RunSpec names it, ``/folder/file.py:build``. Raises BadInput otherwise,
    Forbidden for a student of a class, who may run nobody's code."""
    permissions.require(permissions.is_trusted(), "choosing a file")
    if folder is None:
        raise BadInput(
            "This dashboard was started without --workloads DIR, so it offers built-in workloads."
        )
    root = folder.resolve()
    try:
        path = (root / relative).resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a null byte
        raise BadInput(f"{relative!r} is not a file of the workloads folder.") from error
    if not (path.is_relative_to(root) and is_file and path.suffix == ".py"):
        raise BadInput(f"{relative!r} is not a Python file below the workloads folder.")
    if not entry.isidentifier():
        raise BadInput(f"{entry!r} is not the name of a function.")
    return f"{path}:{entry}"


def _python_files(folder: Path) -> Iterator[Path]:
    root = folder.resolve()
    for current, folders, files in os.walk(folder):  # does not follow links to folders
        here = Path(current)
        is_deep = len(here.relative_to(folder).parts) >= MAX_DEPTH
        folders[:] = [] if is_deep else sorted(f for f in folders if not _is_hidden(f))
        for name in sorted(files):
            path = here / name
            if name.endswith(".py") and not _is_hidden(name) and _lies_in(path, root):
                yield path


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__"))


def _lies_in(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError):
        return False
