"""Files that appear whole or not at all, and temporary folders that leave nothing behind.

A temporary folder's name holds the process that made it, and a file in it is locked for as long as
that lives. What a killed process left behind (a script's output, views of its files, the page with
a dashboard's token) is removed when a command next starts: :func:`remove_leftovers`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from ampscope.store.processes import is_alive, process_start_time

LARGEST_SOURCE = 2**21  # bytes of a Python file; scripts that people write are far below it


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """The path to write to, in the same folder; it takes the name of ``path`` when the block ends
    without an error, and is removed when it does not: a full disk must not replace a good file by
    half of one. What is no ordinary file (a device, a pipe) is written to directly."""
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


_LOCK = ".owner"
_NAME = re.compile(r"ampscope-(?P<pid>\d{1,10})-(?P<started>\d{1,20})-\w+")
_GIVEN = re.compile(r"given-\w+-(?P<pid>\d{1,10})-(?P<started>\d{1,20})\.json")
# A folder of another container's process may not have its lock yet; a child that outlives the
# command takes what was left for it within seconds of its start.
_YOUNG_S = 60.0


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A folder that goes with its ``with`` block, or, if this process is killed, later. It is in
    ``place``, else in the system's folder for such; its owner alone can read it."""

    def __init__(self, place: Path | None = None) -> None:
        pid = os.getpid()
        prefix = f"ampscope-{pid}-{int(process_start_time(pid) or 0)}-"
        super().__init__(prefix=prefix, dir=place)
        self._lock = os.open(Path(self.name) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def cleanup(self) -> None:
        """Remove it, but for the only backups of a user's files."""
        if _holds_backups(Path(self.name)):
            self._finalizer.detach()  # type: ignore[attr-defined]
        else:
            make_deletable(Path(self.name))
            super().cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_leftovers() -> None:
    """Remove this user's folders whose process is gone. Never raises for what it cannot remove."""
    place = Path(tempfile.gettempdir())
    remove_leftovers_in(place)
    _remove_given(place / f"ampscope-{os.getuid()}")


def remove_leftovers_in(place: Path) -> None:
    """Remove the folders in ``place`` whose process is gone. Never raises."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found is not None and _is_own(entry) and _is_left(Path(entry.path), found):
                if _holds_backups(Path(entry.path)):
                    for claim in Path(entry.path).glob("*/roots.json"):
                        claim.unlink(missing_ok=True)  # no process works there any more
                else:
                    throw_away(Path(entry.path))


def _holds_backups(folder: Path) -> bool:
    """Whether a run's files were compared and are not all put back (:mod:`ampscope.runner
    .put_back`): the process was killed meanwhile, or what was there before has no other
    place."""
    return any((found.parent / "kept").is_dir() for found in folder.glob("*.view/before.json"))


def throw_away(folder: Path) -> None:
    """Delete a folder, also what an overlay left in it."""
    if folder.exists():
        make_deletable(folder)
        shutil.rmtree(folder, ignore_errors=True)


def make_deletable(folder: Path) -> None:
    """An overlay leaves folders without any permission behind. What links lead to is left alone."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            inner = os.path.join(path, name)
            with contextlib.suppress(OSError):
                if not os.path.islink(inner):
                    os.chmod(inner, 0o700)


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether it is one of the folders or in one."""
    return any(path == f or path.startswith(f.rstrip("/") + "/") for f in folders)


def _is_own(entry: os.DirEntry[str]) -> bool:
    found = entry.stat(follow_symlinks=False)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _is_left(folder: Path, name: re.Match[str]) -> bool:
    """Whether the process has ended. Its number says so here; a container with the same temporary
    folder has numbers of its own, so that the lock must be free, too."""
    if _lives(name):
        return False
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return time.time() - folder.lstat().st_mtime > _YOUNG_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _lives(name: re.Match[str]) -> bool:
    return is_alive(int(name["pid"]), float(name["started"]) or None)


def _remove_given(folder: Path) -> None:
    """What was left for runs (ampscope.privacy.leave) by a command that is gone, and whose own
    processes never came for it."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        for entry in entries:
            name = _GIVEN.fullmatch(entry.name)
            is_old = time.time() - entry.stat(follow_symlinks=False).st_mtime > _YOUNG_S
            if name is not None and is_old and not _lives(name):
                Path(entry.path).unlink(missing_ok=True)
