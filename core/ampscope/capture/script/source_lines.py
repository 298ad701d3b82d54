"""Which line of the user's own code is running: the innermost frame outside libraries."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

_FRAMEWORKS = ("torch", "keras", "tensorflow", "paddle")  # one built from source lies anywhere


def _folders_of(names: tuple[str, ...]) -> list[str]:
    """Folders of those that are installed; nothing is imported."""
    found = (importlib.util.find_spec(name) for name in names)
    return [str(Path(spec.origin).parent) for spec in found if spec and spec.origin]


_FOLDERS = (
    *_folders_of(_FRAMEWORKS),
    str(Path(__file__).resolve().parents[2]),  # ampscope itself
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
)
_LIBRARIES = tuple(str(Path(folder).resolve()) for folder in _FOLDERS)


class SourceLines:
    """Finds user frames; remembers for each code object whether it is the user's.

    ``own`` names a folder of the user's that counts even below a library folder (a script in the
    package's own zoo).
    """

    def __init__(self, own: str = "") -> None:
        self._own = own
        self._is_user: dict[CodeType, bool] = {}

    def frame(self) -> FrameType | None:
        """Innermost frame of user code, or None."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self.is_user(frame.f_code):
                return frame
            frame = frame.f_back
        return None

    def is_user(self, code: CodeType) -> bool:
        """Whether ``code`` is the user's own."""
        user = self._is_user.get(code)
        if user is None:
            user = self._is_user[code] = self._judge(code.co_filename)
        return user

    def where(self) -> tuple[str, int]:
        """(file, line) of the innermost user frame; ("", 0) when there is none."""
        frame = self.frame()
        return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def _judge(self, filename: str) -> bool:
        if filename.startswith("<"):
            return False
        path = str(Path(filename).resolve())
        if self._own and path.startswith(self._own):
            return True
        return not path.startswith(_LIBRARIES)


def line_name(place: tuple[str, int]) -> str:
    """("…/train.py", 41) -> "train.py:41"."""
    return f"{Path(place[0]).name}:{place[1]}" if place[0] else ""


def line_text(place: tuple[str, int]) -> str:
    """The text of that line, without indentation."""
    return linecache.getline(*place).strip() if place[0] else ""
