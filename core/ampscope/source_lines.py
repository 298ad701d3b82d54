"""Which line of the user's own code is running: the innermost frame outside libraries."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_FRAMEWORKS = ("torch", "keras", "tensorflow", "paddle")  # one built from source lies anywhere


def _folders_of(names: tuple[str, ...]) -> list[str]:
    """Folders of those that are installed; nothing is imported."""
    found = (importlib.util.find_spec(name) for name in names)
    return [str(Path(spec.origin).parent) for spec in found if spec and spec.origin]


_FOLDERS = (
    *_folders_of(_FRAMEWORKS),
    str(Path(__file__).resolve().parent),  # ampscope itself
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
)
_LIBRARIES = tuple(str(Path(folder).resolve()) for folder in _FOLDERS)
# Of these no line is worth naming: torch's own, ampscope's, Python's.
_MACHINERY = tuple(
    str(Path(folder).resolve())
    for folder in (*_folders_of(_FRAMEWORKS), str(Path(__file__).resolve().parent))
)
# Also of another environment that this one builds on (a venv with system site packages).
_INSTALLED = ("site-packages", "dist-packages")
_MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")  # of a project's folder
_project = [""]  # the folder that files are named from, "" for bare names


_NOWHERE = ("", 0), ("", 0)  # in no user code, and in no library's


class SourceLines:
    """Finds user frames; remembers for each file whether it is the user's.

    ``own`` names a folder of the user's that counts even below a library folder (a script in the
    package's own zoo).
    """

    def __init__(self, own: str = "") -> None:
        self._own = own
        # Where the calls stand on whose behalf other threads may work, the newest last.
        self._behind = [_NOWHERE]
        self._is_user: dict[str, bool] = {}  # by file
        self._packages: dict[str, bool] = {}

    def places(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """:meth:`where`, and the line of a library that it led to: the innermost frame of an
        installed package other than torch, ("", 0) when there is none."""
        library = ("", 0)
        known = self._is_user
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            name = code.co_filename
            if known[name] if name in known else self.is_user(code):
                return (name, frame.f_lineno), library
            if not library[0] and self._is_package(code):
                library = (name, frame.f_lineno)
            frame = frame.f_back
        place, behind = self._behind[-1]
        return place, library if library[0] else behind

    def call_for(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``, such as a backward pass, which may do its work in other threads: in
        those without a user frame the line that stands here is the line that runs. A backward pass
        on a device runs in a thread of autograd's own."""
        here = self.places()
        self._behind.append(here)
        try:
            return function(*args, **kwargs)
        finally:
            self._behind.remove(here)  # not the last: another thread may have added its own

    def runs_a_hook(self) -> bool:
        """Whether code of the user's runs within the call that :meth:`call_for` makes."""
        frame = self.frame()
        here = None if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        return here not in (None, self._behind[-1][0])

    def _is_package(self, code: CodeType) -> bool:
        name = code.co_filename
        found = self._packages.get(name)
        if found is None:
            path = str(Path(name).resolve())
            installed = bool(set(_INSTALLED) & set(Path(path).parts))
            found = self._packages[name] = installed and not path.startswith(_MACHINERY)
        return found

    def frame(self) -> FrameType | None:
        """Innermost frame of user code, or None."""
        known = self._is_user  # asked here: millions of frames are looked at in a run
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            name = code.co_filename
            if known[name] if name in known else self.is_user(code):
                return frame
            frame = frame.f_back
        return None

    def is_user(self, code: CodeType) -> bool:
        """Whether ``code`` is the user's own."""
        name = code.co_filename  # equal code of two files compares equal
        user = self._is_user.get(name)
        if user is None:
            user = self._is_user[name] = self._judge(name)
        return user

    def where(self) -> tuple[str, int]:
        """(file, line) of the innermost user frame, also of one that another thread works for; ("",
        0) when there is none."""
        frame = self.frame()
        return self._behind[-1][0] if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def _judge(self, filename: str) -> bool:
        if filename.startswith("<"):
            return False
        path = str(Path(filename).resolve())
        # An environment may lie in the project's folder, as .venv does; it is not the user's.
        below_own = self._own and Path(path).is_relative_to(self._own)
        rest = path[len(self._own) :] if below_own else path
        if set(_INSTALLED) & set(Path(rest).parts):
            return False
        # A checkout of ampscope below the script's folder is no more the user's than one beside it.
        around = (library for library in _LIBRARIES if Path(path).is_relative_to(library))
        return all(below_own and Path(self._own).is_relative_to(library) for library in around)


def name_files_from(folder: str) -> None:
    """From now on name files by their path in the project that ``folder`` lies in, or in the folder
    itself; for a process that runs one script."""
    start = Path(folder).resolve()
    own = not str(start).startswith(str(Path(__file__).resolve().parent))
    around = (start, *start.parents) if own else (start,)
    known = (p for p in around if p != Path.home() and any((p / m).exists() for m in _MARKERS))
    _project[0] = str(next(known, start))


def line_name(place: tuple[str, int]) -> str:
    """("…/train.py", 41) -> "train.py:41"; in a project "src/models/net.py:41", and in a library
    "transformers/models/gpt2/modeling_gpt2.py:41"."""
    if not place[0]:
        return ""
    name = _named(place[0], _project[0]) if _project[0] else Path(place[0]).name
    return f"{name}:{place[1]}"


@functools.cache
def _named(filename: str, project: str) -> str:
    path = Path(filename).resolve()
    name = path.name
    installed = [n for n, part in enumerate(path.parts) if part in _INSTALLED]
    if installed:
        name = "/".join(path.parts[installed[-1] + 1 :])
    elif project and path.is_relative_to(project):
        name = path.relative_to(project).as_posix()
    return path.name if set(name) & set(",;:") else name  # which separate controls


def line_text(place: tuple[str, int]) -> str:
    """The text of that line, without indentation."""
    return linecache.getline(*place).strip() if place[0] else ""
