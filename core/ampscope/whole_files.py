"""A file that is written appears whole under its name, or what was there before stays."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """The path to write to, in the same folder; it takes the name of ``path`` when the block ends
    without an error, and is removed when it does not: a full disk must not replace a good file by
    half of one. What is no ordinary file (a device, a pipe) is written to as it is."""
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve() if path.is_symlink() else path
    aside = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex[:8]}.part")
    try:
        yield aside
        with contextlib.suppress(FileNotFoundError):
            aside.chmod(target.stat().st_mode & 0o777)  # as the file that it replaces
        with aside.open("rb") as file:
            os.fsync(file.fileno())  # some file systems report a full disk only here
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """``text`` as the whole content of ``path``. Raises OSError."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")
