"""Choose what is trained: a built-in model, or a file below one of the operator's folders.

Which files those are is here too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from ampscope.errors import BadInput
from ampscope.records import RunSpec
from ampscope.workloads.catalog import BUILTIN, SIZES
from app import options, permissions
from app.text import escape

# The files that a browser may choose: Python files below the folder that the operator named.
#
# A browser sends a text. It is looked up below the folder, symbolic links and ``..`` are resolved
# first, and what then lies outside is refused; no code is ever uploaded.


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
    Forbidden for a student of a class, who may run no code."""
    path = python_file(folder, relative, "workloads")
    if not entry.isidentifier():
        raise BadInput(f"{entry!r} is not the name of a function.")
    return f"{path}:{entry}"


def python_file(folder: Path | None, relative: str, name: str) -> Path:
    """The file of the operator's folder that the option ``--name`` stands for. Raises BadInput for
    what is none, Forbidden for a student of a class, who may run no code."""
    permissions.require(permissions.is_trusted(), "choosing a file")
    if folder is None:
        raise BadInput(f"This dashboard was started without --{name} DIR: it offers no file.")
    root = folder.resolve()
    try:
        path = (root / relative).resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a null byte
        raise BadInput(f"{relative!r} is not a file of the {name} folder.") from error
    if not (path.is_relative_to(root) and is_file and path.suffix == ".py"):
        raise BadInput(f"{relative!r} is not a Python file below the {name} folder.")
    return path


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


FILE = "file:"  # marks an option that is a path below the operator's folder


@dataclass(frozen=True, slots=True)
class Choice:
    """What the browser sent; nothing of it is trusted before :func:`named`."""

    workload: str
    size: str
    entry: str = DEFAULT_ENTRY


def named(choice: Choice) -> str:
    """The workload as RunSpec names it. Raises BadInput for a file that may not be used."""
    if choice.workload in BUILTIN:
        return choice.workload
    relative = choice.workload.removeprefix(FILE)
    return chosen(options.current().workloads, relative, choice.entry)


def pick_workload(start: RunSpec) -> Choice:
    """The widgets."""
    folder = options.current().workloads
    files = [FILE + name for name in listed(folder)]
    offered = [*BUILTIN, *files]
    choice = st.selectbox(
        "Workload",
        offered,
        index=offered.index(start.workload) if start.workload in offered else 0,
        format_func=_title,
        help=_help(bool(files)),
        key="np-workload",
    )
    size = st.segmented_control(
        "Size",
        SIZES,
        default=start.size if start.size in SIZES else SIZES[0],
        key="np-size",
    )
    size = size or SIZES[0]
    if choice in BUILTIN:
        _describe(choice, size)
        return Choice(choice, size)
    entry = st.text_input(
        "Function",
        DEFAULT_ENTRY,
        help="The function in the file that returns an ampscope.Workload.",
        key="np-entry",
    )
    return Choice(choice, size, entry.strip())


def _title(choice: str) -> str:
    return BUILTIN[choice].title if choice in BUILTIN else choice.removeprefix(FILE)


def _describe(name: str, size: str) -> None:
    info = BUILTIN[name]
    st.caption(escape(f"{info.sentence} {info.parameters[size]:,} parameters."))


def _help(has_files: bool) -> str:
    if has_files:
        return "Built-in models, and the files of the folder named by --workloads."
    return "To try a model of your own, start the dashboard with --workloads DIR."
