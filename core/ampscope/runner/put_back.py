"""The user's files as they were before a run that could write them. Imports no framework.

What they were is written down before the run (:func:`remember`), beside a copy of each; after it,
what differs is put back (:func:`put_back`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import filecmp
import itertools
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ampscope.files import is_below

COMPARED_ENTRIES = 200_000  # of the user's files
MOST_NAMED = 20  # changed files of an installation; of more, the installation alone
CLAIMED = "roots.json"  # the folders that a run has claimed, until its files are put back
KEPT = "kept"  # a folder beside the view's files
_BEFORE = "before.json"
_FICLONE = 0x40049409  # linux/fs.h: share another file's blocks until one of the two is written


class _Facts(NamedTuple):
    """Of one file, link or folder."""

    mode: int
    size: int
    changed_ns: int
    inode: int
    text: str  # of a link
    owner: str  # and group
    attributes: str  # extended ones


_Difference = tuple[str, _Facts | None, _Facts | None]  # path, before, now


@dataclass(slots=True)
class PutBack:
    """What became of the user's files that one run has changed."""

    aside: str  # where what they had become is kept; ``aside.txt`` lists them
    restored: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # changed still -> its backup, or ""
    keeps_view: bool = False  # the only backups are in the view, which must not be deleted


def sentence(of_runs: Sequence[PutBack]) -> str:
    """For the user; "" where nothing was changed. What could not be put back is named in full."""
    of_runs = [one for one in of_runs if one.restored or one.left]
    left = {path: backup for one in of_runs for path, backup in one.left.items()}
    restored = sorted({path for one in of_runs for path in one.restored} - left.keys())
    said = []
    if left:
        each = [f"{p} (it was as {b} is)" if b else p for p, b in sorted(left.items())]
        said.append(f"NOT put back, left changed by the script or while it ran: {', '.join(each)}.")
    if restored:
        more = f" and {len(restored) - 4} more" if len(restored) > 4 else ""
        said.append(
            f"{', '.join(restored[:4])}{more} differed after a run from what was there before, and "
            "what was there before is put back."
        )
    if of_runs:
        places = ", ".join(one.aside for one in of_runs[:2]) + (", …" if len(of_runs) > 2 else "")
        said.append(
            "What they had become, which may be your own work, is kept in "
            f"{places}; a list of all is beside it."
        )
    return " ".join(said)


def remember(roots: Sequence[str], folder: Path, store: str, temporary: str, *, only: bool) -> None:
    """Write down in ``folder`` what lies in ``roots``, but for the ``store``. ``only``: the run can
    write nothing there but times and permissions. ``temporary`` goes with what was written down."""
    apart: list[str] | None = None if only else []
    unread: list[str] = []
    told = {"only": only, "roots": list(roots), "store": store, "temporary": temporary}
    told |= {"files": dict(walked(roots, store, apart, unread)), "apart": apart, "unread": unread}
    told["installed"] = _installed(apart or [])
    (folder / _BEFORE).write_text(json.dumps(told))


def put_back(folder: Path, aside: Path) -> PutBack:
    """Make the user's files what they were before the run whose copy is below ``folder``. What they
    have become is kept in ``aside``: it may be the user's own work, or another program's. A file is
    never written over: what cannot be put back is left, and its backup is kept. Where the run could
    write nothing else, its times and permissions alone are put back."""
    done = PutBack(str(aside))
    try:
        told = json.loads((folder / _BEFORE).read_text())
    except (OSError, ValueError):  # no copy, or one that was not finished
        return done
    before = {path: _Facts(*facts) for path, facts in told["files"].items()}
    folders = [(path, facts) for path, facts in before.items() if stat.S_ISDIR(facts.mode)]
    if told["only"]:
        for path, old, new in _differences(told, before):
            with contextlib.suppress(OSError):
                if old and new and (old.size, old.inode) == (new.size, new.inode):
                    _as_before(path, old, is_known=_is_copy(f"{folder}/files{path}", path))
    else:
        for path, facts in folders:  # from above: what is inside can be seen
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(mode := os.lstat(path).st_mode) and mode != facts.mode:
                    os.chmod(path, stat.S_IMODE(facts.mode) | stat.S_IRWXU)
                    done.restored.append(path)
        found = sorted(_differences(told, before), key=lambda one: one[0])
        if found:
            with contextlib.suppress(OSError):  # for the user alone: it may be from such folders
                aside.parent.mkdir(mode=0o700, exist_ok=True)
        partly = _kept_in_part(before, f"{folder}/{KEPT}")
        for one in partly:
            inside = [path for path, *_ in found if is_below(path, (one,))]
            done.left.update(dict.fromkeys([one] if len(inside) > MOST_NAMED else inside, ""))
        found = [one for one in found if not is_below(one[0], partly)]
        _put_back(found, f"{folder}/{KEPT}", done)
        if found or done.restored:
            for path, facts in reversed(folders):
                with contextlib.suppress(OSError):
                    is_there = os.path.isdir(path) and not os.path.islink(path)
                    if is_there and not is_below(path, partly):
                        _as_before(path, facts, is_known=True)
        done.left.update(dict.fromkeys(_changed_installations(told), ""))
        _keep_backups(folder, done)
    shutil.rmtree(told["temporary"], ignore_errors=True)
    if not done.keeps_view:
        (folder / _BEFORE).unlink(missing_ok=True)
    (folder / CLAIMED).unlink(missing_ok=True)
    return done


def _kept_in_part(before: Mapping[str, _Facts], kept: str) -> list[str]:
    """Repositories of which not every file is ``kept``: each holds together as a whole, and some of
    its files put back, others not, would damage it."""
    whole = [p for p, facts in before.items() if is_repository(p) and stat.S_ISDIR(facts.mode)]
    lost = [p for p, f in before.items() if stat.S_ISREG(f.mode) and not os.path.exists(kept + p)]
    return [one for one in whole if any(is_below(path, (one,)) for path in lost)]


def _differences(told: Any, before: Mapping[str, _Facts]) -> list[_Difference]:
    """(path, before, now) of what differs; of a folder, its permissions alone: what was made in it
    is named itself. What is new is not known where there was more than one walk sees, below what
    could not be read before, and in what was an installation."""
    now: dict[str, _Facts] = {}
    if len(before) < COMPARED_ENTRIES:
        now.update(walked(told["roots"], told["store"], None if told["only"] else []))
    for path in before.keys() - now.keys():
        with contextlib.suppress(OSError):
            now[path] = _facts(path)
    found = []
    unknown = {*told["unread"], *(told["apart"] or [])}
    for path in before.keys() | now.keys():
        old, new = before.get(path), now.get(path)
        if old is None and is_below(path, unknown):
            continue
        if old and new and stat.S_ISDIR(old.mode) and stat.S_ISDIR(new.mode):
            is_changed = (old.mode, *old[5:]) != (new.mode, *new[5:])
        else:
            is_changed = old != new
        if is_changed:
            found.append((path, old, new))
    return found


def _changed_installations(told: Any) -> list[str]:
    """Files of installations that have changed, or where they are many, the installations."""
    before = {path: _Facts(*facts) for path, facts in told["installed"].items()}
    now = _installed(told["apart"])
    if len(before) == COMPARED_ENTRIES:
        now = {path: facts for path, facts in now.items() if path in before}
    found = [
        path
        for path in sorted(before.keys() | now.keys())
        if (a := before.get(path)) != (b := now.get(path))
        and not (a and b and stat.S_ISDIR(a.mode) and a.mode == b.mode)
    ]
    if len(found) <= MOST_NAMED:
        return found
    return [one for one in told["apart"] if any(is_below(path, (one,)) for path in found)]


def _put_back(found: list[_Difference], kept: str, done: PutBack) -> None:
    """``found`` is sorted by path. What is new goes first: it may have filled the disk."""
    failed: set[str] = set()
    for path, old, new in reversed(found):  # what is inside first
        if new and (old is None or stat.S_IFMT(old.mode) != stat.S_IFMT(new.mode)):
            try:
                if stat.S_ISDIR(new.mode):
                    os.rmdir(path)  # what was in it is aside
                else:
                    _move(path, f"{done.aside}{path}")
            except OSError:
                failed.add(path)
    for path, old, _ in found:
        if old is not None and path not in failed:
            try:
                if not _restored(path, old, kept + path, done.aside + path):
                    failed.add(path)
            except OSError:
                failed.add(path)
    done.restored += [path for path, *_ in found if path not in failed]
    done.left.update(dict.fromkeys(sorted(failed), ""))


def _restored(path: str, before: _Facts, kept: str, aside: str) -> bool:
    """Whether the file is what it was. Raises OSError, and then nothing is lost."""
    if stat.S_ISDIR(before.mode):
        os.makedirs(path, exist_ok=True)
        return True
    if stat.S_ISLNK(before.mode):
        if os.path.lexists(path):
            _move(path, aside)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(before.text, path)
        _as_before(path, before, is_known=True)
        return True
    if not stat.S_ISREG(before.mode):
        return False
    if not os.path.exists(kept):  # too large for a copy
        if not os.path.lexists(path):
            return False
        now = _facts(path)
        _as_before(path, before, is_known=False)
        return now[1:5] == before[1:5]
    if not _is_copy(kept, path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _replace(path, kept, aside)
    _as_before(path, before, is_known=True)
    return True


def _replace(path: str, kept: str, aside: str) -> None:
    """The contents of ``kept`` take the place of the file, which is moved ``aside``."""
    with tempfile.TemporaryDirectory(prefix=".ampscope-", dir=os.path.dirname(path)) as made:
        part = f"{made}/part"
        try:
            if os.stat(kept).st_dev == os.stat(made).st_dev:
                part = kept
            else:
                copy_file(kept, part)
        except OSError:
            if not os.path.lexists(path):
                raise
            _move(path, aside)  # it may be what fills the disk
            copy_file(kept, part)
        if os.path.lexists(path):
            _move(path, aside)
        os.rename(part, path)


def _move(path: str, aside: str) -> None:
    os.makedirs(os.path.dirname(aside), exist_ok=True)
    shutil.move(path, aside)


def _keep_backups(folder: Path, done: PutBack) -> None:
    """Of what is left changed, beside what is kept; on a full disk where they are, for good."""
    kept = f"{folder}/{KEPT}"
    for path in done.left:
        if os.path.isfile(kept + path):
            target = f"{done.aside}.before{path}"
            try:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                copy_file(kept + path, target)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(target)
                moved = f"{folder.parent}-kept-{folder.name}"
                try:
                    os.chmod(kept, 0o700)
                    os.rename(kept, moved)
                    kept = moved
                except OSError:
                    done.keeps_view = True
                target = kept + path
            done.left[path] = target
    if done.left or done.restored:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(done.aside), exist_ok=True)
            lines = [f"not put back: {path}\n" for path in done.left]
            lines += [f"put back: {path}\n" for path in sorted(done.restored)]
            Path(f"{done.aside}.txt").write_text("".join(lines), errors="surrogateescape")


def _is_copy(copy: str, path: str) -> bool:
    is_there = os.path.isfile(copy) and not os.path.islink(copy) and os.path.isfile(path)
    return is_there and not os.path.islink(path) and filecmp.cmp(path, copy, shallow=False)


def _as_before(path: str, before: _Facts, *, is_known: bool) -> None:
    """Owner, attributes, permissions, and the time of change where the contents are known to be
    what they were: otherwise someone may have edited the file."""
    now = _facts(path)
    if now.owner != before.owner:
        with contextlib.suppress(OSError):
            user, group = map(int, before.owner.split(":"))
            os.chown(path, user, group, follow_symlinks=False)
    if now.attributes != before.attributes:
        old = json.loads(before.attributes)
        for name in json.loads(now.attributes).keys() | old.keys():
            with contextlib.suppress(OSError):
                if name in old:
                    os.setxattr(path, name, bytes.fromhex(old[name]), follow_symlinks=False)
                else:
                    os.removexattr(path, name, follow_symlinks=False)
    if not stat.S_ISLNK(before.mode):
        os.chmod(path, stat.S_IMODE(before.mode))
    if is_known:
        os.utime(path, ns=(before.changed_ns, before.changed_ns), follow_symlinks=False)


def walked(
    roots: Sequence[str], store: str, apart: list[str] | None, unread: list[str] | None = None
) -> Iterator[tuple[str, _Facts]]:
    """Everything below the roots, and they themselves, but for installations and ``store``; of the
    user's home its own files alone, and no hidden ones: other programs are at work there. At most
    COMPARED_ENTRIES. ``apart`` gets the installations; without it, repositories are left out.
    ``unread`` gets what the system does not show."""
    inside = _all_below(roots, store_names(store), apart, unread=unread)
    return itertools.islice(inside, COMPARED_ENTRIES)


def _installed(folders: Sequence[str]) -> dict[str, _Facts]:
    """What lies in installations, but for what Python compiles there by itself."""
    inside = _all_below(folders, frozenset(), None, is_installation=True)
    return dict(itertools.islice(inside, COMPARED_ENTRIES))


def _all_below(
    roots: Sequence[str],
    own: frozenset[str],
    apart: list[str] | None,
    *,
    is_installation: bool = False,
    unread: list[str] | None = None,
) -> Iterator[tuple[str, _Facts]]:
    left = list(roots)
    home = os.path.expanduser("~")
    unread = [] if unread is None else unread
    for folder in left:
        try:
            yield folder, _facts(folder)
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError:
            unread.append(folder)
            continue
        for entry in entries:
            if entry.path in own:
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    if is_installation:
                        left += [entry.path] * (entry.name != "__pycache__")
                    elif folder == home:
                        continue
                    elif not is_installed(entry.path) or (
                        apart is not None and is_repository(entry.path)
                    ):
                        left.append(entry.path)
                    elif apart is not None:
                        apart.append(entry.path)
                elif not (folder == home and entry.name[0] == "."):
                    yield entry.path, _facts(entry.path)
            except FileNotFoundError:  # another program has just removed it
                continue
            except OSError:
                unread.append(entry.path)


def _facts(path: str) -> _Facts:
    found = os.lstat(path)
    text = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
    owner, attributes = f"{found.st_uid}:{found.st_gid}", {}
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            names = sorted(os.listxattr(path, follow_symlinks=False))
            attributes = {n: os.getxattr(path, n, follow_symlinks=False).hex() for n in names}
    plain = found.st_mode, found.st_size, found.st_mtime_ns, found.st_ino
    return _Facts(*plain, text, owner, json.dumps(attributes))


def store_names(store: str) -> frozenset[str]:
    """What lies beside a store and is ampscope's own."""
    ends = ("", "-wal", "-shm", "-journal", ".changed", ".capsules", ".jobs")
    return frozenset(f"{store}{end}" for end in ends if store)


def is_installed(folder: str) -> bool:
    """An environment, packages or a repository's own data: no script's output."""
    return os.path.exists(f"{folder}/pyvenv.cfg") or folder.endswith(("/.git", "/node_modules"))


def is_repository(folder: str) -> bool:
    """The data of a repository: they hold together as a whole."""
    return folder.endswith("/.git")


def copy_file(source: str, target: str) -> None:
    """With its times and permissions; by reference where the file system can."""
    if not cloned(source, target):
        shutil.copyfile(source, target)
    shutil.copystat(source, target)


def cloned(source: str, target: str) -> bool:
    """Whether the two files now share their blocks (btrfs, xfs; APFS)."""
    if sys.platform == "darwin":
        return not ctypes.CDLL(None).clonefile(os.fsencode(source), os.fsencode(target), 0)
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(target)
        return False
    return True
