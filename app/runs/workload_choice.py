"""Choose what is trained: a built-in model, or one of the files below the operator's folders."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from ampscope.errors import BadInput
from ampscope.records import RunSpec
from ampscope.workloads.catalog import BUILTIN, SIZES
from app import options, permissions
from app.text import escape, plural

# The files that a browser may choose: Python files below the folder that the operator named.
#
# A browser sends a text. It is looked up below the folder, symbolic links and ``..`` are resolved
# first, and what then lies outside is refused; no code is ever uploaded.


WALK_S = 1.0  # of reading folders; a repository of 60,000 files takes 0.4 s
REST = 10.0  # times what a walk took: so long its list is offered again
MAX_OFFERED = 1_000  # in one select box; a search reaches all
# What is installed or made, and not written by the user. A folder with the second name in it is an
# environment, whatever its own name is.
_NOT_OURS = frozenset(("node_modules", "venv", "site-packages", "dist-packages"))
_ENVIRONMENT = "pyvenv.cfg"
DEFAULT_ENTRY = "build"


@dataclass(frozen=True, slots=True)
class Listing:
    """Relative paths of Python files, the most recently changed first. Where reading the folders
    took too long, ``unread`` of them, the deepest, were not opened."""

    files: tuple[str, ...] = ()
    unread: int = 0


_listings: dict[Path, tuple[float, float, Listing]] = {}  # folder -> when, how long it took, what


def listed(folder: Path | None) -> Listing:
    """The files that a browser may choose; none without a folder. Hidden files and folders are left
    out, and what package managers put below a project."""
    if folder is None or not permissions.is_trusted():
        return Listing()
    when, took_s, listing = _listings.get(folder, (-math.inf, 0.0, Listing()))
    begun = time.monotonic()
    if begun - when > REST * took_s:
        listing = _walked(folder, begun + WALK_S)
        now = time.monotonic()
        _listings[folder] = now, now - begun, listing
    return listing


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


def _walked(folder: Path, deadline: float) -> Listing:
    """Breadth-first, so that what is left out at the ``deadline`` lies deepest. No file is opened;
    links to folders are not followed."""
    root = folder.resolve()
    found: list[tuple[float, str]] = []
    waiting = deque([("", str(folder))])
    while waiting and time.monotonic() < deadline:
        prefix, path = waiting.popleft()
        try:
            with os.scandir(path) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
        except OSError:  # removed meanwhile, or not ours to read
            continue
        if prefix and any(entry.name == _ENVIRONMENT for entry in inside):
            continue
        for entry in inside:
            if entry.name.startswith((".", "__")):
                continue
            relative = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _NOT_OURS:
                    waiting.append((f"{relative}/", entry.path))
            elif entry.name.endswith(".py") and (
                not entry.is_symlink() or _lies_in(Path(entry.path), root)
            ):
                found.append((_changed_at(entry), relative))
    found.sort(key=lambda one: (-one[0], one[1]))
    return Listing(tuple(name for _, name in found), len(waiting))


def _changed_at(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:  # removed meanwhile, or a link that leads nowhere
        return 0.0


def _lies_in(path: Path, root: Path) -> bool:
    try:
        return path.resolve().is_relative_to(root)
    except (OSError, RuntimeError):
        return False


FILE = "file:"  # marks an option that is a path below the operator's folder


@dataclass(frozen=True, slots=True)
class WorkloadChoice:
    """What the browser sent; nothing of it is trusted before :func:`named`."""

    workload: str
    size: str
    entry: str = DEFAULT_ENTRY


def named(choice: WorkloadChoice) -> str:
    """The workload as RunSpec names it. Raises BadInput for a file that may not be used."""
    if choice.workload in BUILTIN:
        return choice.workload
    relative = choice.workload.removeprefix(FILE)
    return chosen(options.current().workloads, relative, choice.entry)


def pick_file(label: str, folder: Path, key: str) -> str:
    """The widgets that choose one of the files below ``folder``, the newest first: a select box,
    and above it a search where it cannot hold all. The path that comes back is not yet checked:
    where the folder was not read whole, one may be typed."""
    listing = listed(folder)
    files = listing.files
    if len(files) > MAX_OFFERED:
        words = st.text_input("Find a script", key=f"{key}-find", placeholder="part of its path")
        asked = words.lower().split()
        files = tuple(f for f in files if all(word in f.lower() for word in asked))
    shown = files[:MAX_OFFERED]
    chosen = st.selectbox(
        label,
        shown,
        key=key,
        help="Most recently changed first; type to search.",
        accept_new_options=bool(listing.unread),
        placeholder="No file has these words in its path" if not shown else None,
    )
    _say_what_is_missing(listing, len(files), "search for another")
    return chosen or ""


def _say_what_is_missing(listing: Listing, matching: int, way: str) -> None:
    """Which files a select box does not hold, and the ``way`` to get at them."""
    said = []
    if matching > MAX_OFFERED:
        said.append(f"The {MAX_OFFERED:,} newest of {matching:,} files are offered: {way}.")
    if listing.unread:
        folders = plural(listing.unread, "folder")
        said.append(
            f"Reading the folder was stopped after {WALK_S:g} s: {folders}, the deepest, "
            f"{'was' if listing.unread == 1 else 'were'} not read. A newer script may lie there: "
            "type its path above, or start the dashboard with a smaller folder."
        )
    if said:
        st.caption(" ".join(said))


def pick_workload(start: RunSpec) -> WorkloadChoice:
    """The widgets."""
    folder = options.current().workloads
    listing = listed(folder)
    files = [FILE + name for name in listing.files[:MAX_OFFERED]]
    offered = [*BUILTIN, *files]
    choice = st.selectbox(
        "Workload",
        offered,
        index=offered.index(start.workload) if start.workload in offered else 0,
        format_func=_title,
        help=_help(bool(files)),
        key="np-workload",
        accept_new_options=len(listing.files) > MAX_OFFERED or bool(listing.unread),
    )
    choice = choice or offered[0]  # none while another is being typed
    _say_what_is_missing(listing, len(listing.files), "type the path of another")
    size = st.segmented_control(
        "Size",
        SIZES,
        default=start.size if start.size in SIZES else SIZES[0],
        key="np-size",
    )
    size = size or SIZES[0]
    if choice in BUILTIN:
        _describe(choice, size)
        return WorkloadChoice(choice, size)
    entry = st.text_input(
        "Function",
        DEFAULT_ENTRY,
        help="The function in the file that returns an ampscope.Workload.",
        key="np-entry",
    )
    return WorkloadChoice(choice, size, entry.strip())


def _title(choice: str) -> str:
    return BUILTIN[choice].title if choice in BUILTIN else choice.removeprefix(FILE)


def _describe(name: str, size: str) -> None:
    info = BUILTIN[name]
    st.caption(escape(f"{info.sentence} {info.parameters[size]:,} parameters."))


def _help(has_files: bool) -> str:
    if has_files:
        return "Built-in models, and the files of the folder named by --workloads."
    return "To try a model of your own, start the dashboard with --workloads DIR."
