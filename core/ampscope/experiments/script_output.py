"""A script's output, followed in the file that it goes to.

Files rather than pipes: however much a script prints, and whoever else holds its output, nobody
waits for a reader.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path

PART_BYTES = 1 << 20


class Followed:
    """Hands what is new in ``path`` to ``write``."""

    def __init__(self, path: Path, write: Callable[[bytes], object]) -> None:
        self._path = path
        self._write = write
        self._at = 0

    def drain(self) -> None:
        """Everything up to the file's end."""
        if not self._path.exists():
            return
        with self._path.open("rb") as handle:
            handle.seek(self._at)
            while part := handle.read(PART_BYTES):
                self._at += len(part)
                self._write(part)


def as_text(show: Callable[[str], None]) -> Callable[[bytes], None]:
    """``show`` for bytes: a character that is cut in two by a read stays whole."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(part: bytes) -> None:
        show(decoder.decode(part))

    return write


def tail(path: Path, size: int) -> str:
    """The last ``size`` bytes of ``path``; "" when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - size))
        return handle.read().decode(errors="replace")
