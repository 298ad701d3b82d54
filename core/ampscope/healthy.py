"""The last checkpoint of a training that was healthy: named, and kept from a trainer's rotation.

``ampscope-healthy.json`` beside the checkpoints names it, with each of its files (size, inode,
time of the last write, so that one which was overwritten in place is not taken for healthy);
where that is asked for, ``ampscope-healthy/`` keeps it as hard links. Each appears whole or not at
all, so that a kill at any moment leaves the one before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path

from ampscope.files import write_whole

MARKER = "ampscope-healthy.json"
KEPT = "ampscope-healthy"


def mark_healthy(path: Path, step: int, run: str, *, keep: bool) -> Path:
    """Name ``path`` as the last healthy checkpoint of its folder; with ``keep`` by hard links that
    outlive its deletion. Returns the path that is named. Raises OSError."""
    named = path
    kept = path.parent / KEPT
    if keep:
        kept.mkdir(exist_ok=True)
        named = _free_name(path.parent, f"step-{step}", path.name)
        aside = kept / f".{named.name}.part"
        _remove(aside)
        if path.is_dir():
            shutil.copytree(path, aside, copy_function=_link)
        else:
            _link(str(path), str(aside))
        aside.rename(named)
    files = sorted(f for f in named.rglob("*") if f.is_file()) if named.is_dir() else [named]
    text = json.dumps(
        {
            "checkpoint": os.path.relpath(named, path.parent),
            "step": step,
            "run": run,
            "files": {os.path.relpath(f, path.parent): _stamp(f) for f in files},
        }
    )
    write_whole(path.parent / MARKER, text + "\n")
    if keep:  # what was kept before is needed no more, now that this one is named
        for old in kept.iterdir():
            if old != named:
                _remove(old)
    return named


def _free_name(folder: Path, step: str, name: str) -> Path:
    """Where the checkpoint is kept. A training that was started again may save the same step under
    the same name: the one that is named now stays until the new one is."""
    marked = last_healthy(folder)
    for number in itertools.count(1):
        found = folder / KEPT / f"{step if number == 1 else f'{step}-{number}'}-{name}"
        if found != marked:
            break
    _remove(found)  # of a marking that was killed
    return found


def last_healthy(folder: str | Path) -> Path | None:
    """The last checkpoint in ``folder`` that was marked healthy and is whole; None without one."""
    folder = Path(folder)
    try:
        found = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        path = folder / str(found["checkpoint"])
        whole = all(_is_same(folder / str(f), stamp) for f, stamp in found["files"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return path if whole and path.exists() else None


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns]


def _is_same(path: Path, stamp: list[int]) -> bool:
    """Another inode is a copy of the folder: its size is what can be compared."""
    size, inode, written = _stamp(path)
    return size == stamp[0] and (inode != stamp[1] or written == stamp[2])


def _link(source: str, target: str) -> None:
    """A second name of a file; a copy where the file system has no hard links."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
