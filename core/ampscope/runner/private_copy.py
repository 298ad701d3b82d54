"""A plain copy of the folders that a script writes, where the system gives a process no file system
of its own. Imports no framework.

The script runs in the copy, at other paths: its working folder, its own file, and what arguments
and the environment name lead there. Landlock (Linux 6.2) makes everything else unwritable for the
process and all that it starts. Where there is none, the user's files are compared after the run and
put back (:func:`put_back`), from a second copy that nothing is led to.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import filecmp
import itertools
import json
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# A file up to this size is copied, a larger one while the sum is below the second number. What is
# not copied is a link.
COPIED_BYTES, LARGE_BYTES = 64 << 20, 1 << 30
NAMED_SMALL, NAMED_BYTES = 1 << 20, 32 << 20  # the same of folders that are only named somewhere
COPIED_ENTRIES = 2_000  # in a folder, all levels: above it files are links
LINKS = 20_000  # in one copy; a folder that needs more is a link, or its direct entries are
ALL_BYTES, ALL_FILES = 4 << 30, 50_000  # of the copied files up to COPIED_BYTES, smallest first
COMPARED_ENTRIES = 200_000  # of the user's files
_SHORT = 72  # of a temporary folder: sockets are made there, whose paths have at most 103 bytes
_FICLONE = 0x40049409  # linux/fs.h: share another file's blocks until one of the two is written
_BEFORE, _KEPT = "before.json", "kept"
CLAIMED = "roots.json"  # the folders that a run has claimed, until its files are put back
MOST_NAMED = 20  # changed files of an installation; of more, the installation alone
WAITED_S = 60.0  # for another diagnosis; less than what a run itself may take
# What they name is no place of output; PWD may be out of date.
NOT_NAMED = ("PWD", "OLDPWD", "PYTHONPATH", "CONDA_PREFIX", "SHELL", "_")
NEVER_LED = ("HOME", "PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
# A path in an argument begins at its start, behind a sign, or behind a short option (``-o/a``).
_SIGNS = r"\s=,;:\"'{}\[\]()"
_PATH = re.compile(rf"(?:^|(?<=[{_SIGNS}])|(?<=^-\w))(?:~(?=/|$)|/)[^{_SIGNS}]*")


class Copy:
    """A copy of ``roots`` below ``base``, at the same paths, without the files of ``store``."""

    def __init__(
        self,
        roots: Sequence[str],
        named: Sequence[str],
        plain: Sequence[str],
        base: str,
        store: str,
        first: Sequence[str] = (),
    ) -> None:
        """Of the ``plain`` folders, a system's, the files alone are copied; of those that are only
        ``named`` somewhere, less of what is large. ``first``: the script's own projects, each a
        root or in one."""
        self.roots = (*roots, *named)
        self.base = base
        self._named = tuple(named)
        self._plain = list(plain)
        self._with_git = False
        self._first = tuple(first)
        self._own = store_names(store)
        self._links = LINKS
        self._small = COPIED_BYTES
        self._folders: list[tuple[str, str]] = []
        self._left = [ALL_BYTES, ALL_FILES]
        self._files: list[tuple[int, str, str]] = []  # (bytes, file, its place)

    def make(self, kept: str = "") -> None:
        """Raises OSError. ``kept``: a folder for another copy of each file that is copied, and of
        those of a repository, which are copied then."""
        self._with_git = bool(kept)
        home = os.path.expanduser("~")
        asked = [r for r in self.roots if r not in (*self._named, *self._first)]
        for roots, small, room in (
            (self._first, COPIED_BYTES, LARGE_BYTES),
            (asked, COPIED_BYTES, LARGE_BYTES),
            (self._named, NAMED_SMALL, NAMED_BYTES),
        ):
            self._small = small
            for root in roots:
                linked = root == home or (root not in self._first and _is_large(root))
                self._folder(root, self.base + root, linked=linked)
            self._copy_files(room)
        for folder in self._plain:
            self._files_alone(folder, self.base + folder)
        self._copy_files(NAMED_BYTES)
        for source, target in reversed(self._folders):  # what is made in a folder changes its time
            with contextlib.suppress(OSError):
                shutil.copystat(source, target)
        if kept:
            for path, facts in _walked([self.base + root for root in self.roots], "", []):
                if stat.S_ISREG(facts.mode):
                    target = kept + path[len(self.base) :]
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    copy_file(path, target)

    def _copy_files(self, room: int) -> None:
        left = min(room, shutil.disk_usage(self.base).free // 4)
        for size, source, target in sorted(self._files):
            if size > self._small:
                left -= size
            else:
                self._left[0] -= size
                self._left[1] -= 1
            with contextlib.suppress(FileNotFoundError):  # another program has just removed it
                if (left if size > self._small else min(self._left)) >= 0:
                    copy_file(source, target)
                elif not _cloned(source, target):
                    os.symlink(source, target)
        self._files.clear()

    def led(self, path: str) -> str:
        """Where a path leads from inside the copy."""
        real = os.path.realpath(path)
        if _below(real, self.roots) or {real, os.path.dirname(real)} & set(self._plain):
            return self.base + real
        return path

    def led_text(self, text: str) -> str:
        """The same for each path in an argument or a variable."""
        head, equals, whole = text.rpartition("=")
        if whole.startswith("/") and os.path.lexists(whole):  # with blanks or commas in it
            return f"{head}{equals}{self.led(whole)}"
        return _PATH.sub(lambda m: self._led_if_below(m[0]), text)

    def _led_if_below(self, path: str) -> str:
        full = os.path.expanduser(path)
        led = self.led(full)
        signs = (len(path) - len(path.lstrip("/")) - 1) * "/"  # of file:///a
        return path if led == full else signs + led

    def _folder(self, source: str, target: str, *, linked: bool, depth: int = 0) -> None:
        os.makedirs(target, exist_ok=True)
        self._folders.append((source, target))
        with os.scandir(source) as found:
            entries = list(found)
        for entry in entries:
            place = f"{target}/{entry.name}"
            if entry.path in self._own:
                continue
            with contextlib.suppress(FileNotFoundError):  # another program has just removed it
                if entry.is_symlink():
                    self._link(entry.path, place, depth)
                elif entry.is_dir():
                    self._inner(entry.path, place, linked=linked, depth=depth)
                elif entry.is_file():
                    self._file(entry.path, place, linked=linked)

    def _files_alone(self, source: str, target: str) -> None:
        os.makedirs(target, exist_ok=True)
        with os.scandir(source) as found:
            for entry in found:
                place = os.path.join(target, entry.name)
                if os.path.lexists(place) or entry.path in self._own:
                    continue  # on the way to a root
                with contextlib.suppress(OSError):  # another user's
                    if entry.is_file(follow_symlinks=False):
                        self._file(entry.path, place, linked=False)
                    else:
                        os.symlink(entry.path, place)

    def _inner(self, source: str, target: str, *, linked: bool, depth: int) -> None:
        if _below(self.base, (source,)) or source in self._first:
            return  # the copy would hold itself; it is there
        if any(_below(first, (source,)) for first in self._first):
            with contextlib.suppress(PermissionError):  # the script may stand below all the same
                self._folder(source, target, linked=linked, depth=depth)
            return
        is_git = self._with_git and _is_repository(source)
        is_put_back = is_git and not _is_large(source, COPIED_ENTRIES)
        is_linked = is_installed(source) and not is_put_back
        if is_linked or not os.access(source, os.R_OK | os.X_OK):
            os.symlink(source, target)
            return
        direct = len(os.listdir(source))
        if not linked and not _is_large(source):
            self._folder(source, target, linked=False, depth=depth)
        elif direct <= self._links if linked else not _is_large(source, self._links // 2):
            self._folder(source, target, linked=True, depth=depth)
        elif not linked and direct <= self._links // 2:
            self._links_alone(source, target)
        else:
            os.symlink(source, target)

    def _links_alone(self, source: str, target: str) -> None:
        os.makedirs(target)
        self._folders.append((source, target))
        for name in os.listdir(source):
            if f"{source}/{name}" not in self._own:
                self._links -= 1
                os.symlink(f"{source}/{name}", f"{target}/{name}")

    def _link(self, source: str, target: str, depth: int) -> None:
        """A link out of the roots is followed, so that what is written through it stays here."""
        real = os.path.realpath(source)
        is_own = os.access(real, os.W_OK) and depth < 2 and not _below(self.base, (real,))
        if _below(real, self.roots):
            os.symlink(self.base + real, target)
        elif is_own and os.path.isdir(real):
            if any(_below(root, (real,)) for root in self.roots):  # to what holds the project
                self._plain.append(real)
                os.symlink(self.base + real, target)
            else:
                self._inner(real, target, linked=False, depth=depth + 1)
        elif is_own and os.path.isfile(real):
            self._file(real, target, linked=False)
        else:
            os.symlink(real, target)

    def _file(self, source: str, target: str, *, linked: bool) -> None:
        facts = os.stat(source)
        # What this user may not write stays the other's, unless it is this user's own.
        is_others = facts.st_uid != os.geteuid() and not os.access(source, os.W_OK)
        is_apart = is_others or not os.access(source, os.R_OK)
        if is_apart or (linked and not _cloned(source, target)):
            self._links -= 1
            os.symlink(source, target)
        else:
            self._files.append((facts.st_size, source, target))


def copied(
    roots: Sequence[str],
    named: Sequence[str],
    led: Sequence[str],
    plain: Sequence[str],
    folder: Path,
    store: Path,
    writable: Iterable[str],
    *,
    only: bool,
    first: Sequence[str] = (),
) -> Copy:
    """Give this process, which must have a single thread, a copy of ``roots`` below ``folder``,
    with less of those that are only ``named``, or to which variables are ``led``, and of the files
    that lie in ``plain`` itself.
    ``only``: nothing but the copy, a temporary folder, the store and what is ``writable`` can be
    written from now on; otherwise :func:`put_back` is what the user's files need afterwards.
    Raises OSError."""
    if only and landlock_version() < ALL_WRITES:
        raise OSError("this system has no Landlock that hears of every write")
    base, temporary = os.path.realpath(folder) + "/files", os.path.realpath(folder) + "/t"
    for made in (base, temporary):
        shutil.rmtree(made, ignore_errors=True)  # of a way that did not work
        os.makedirs(made)
    if only and len(temporary) >= _SHORT:
        with contextlib.suppress(OSError):  # named as a folder that goes where this process is gone
            temporary = tempfile.mkdtemp(prefix=f"ampscope-{os.getpid()}-0-", dir="/tmp")
    if not only:
        _claim([*roots, *named], folder)
    copy = Copy(roots, [*named, *led], plain, base, str(store.absolute()), first)
    copy.make("" if only else f"{os.path.realpath(folder)}/{_KEPT}")
    # What only a variable names is not compared: the script is led to the copy, and other programs
    # are at work there, whose files nobody may put back.
    roots = copy.roots if only else (*roots, *named)
    apart: list[str] | None = None if only else []
    unread: list[str] = []
    before = dict(_walked(roots, str(store.absolute()), apart, unread))
    told = {"only": only, "roots": list(roots), "store": str(store.absolute()), "files": before}
    told |= {"temporary": temporary, "apart": apart, "installed": _installed(apart or [])}
    told["unread"] = unread
    (folder / _BEFORE).write_text(json.dumps(told))
    # Its first version lets no file be renamed from one folder to another.
    if only or landlock_version() == 2:
        _make_unwritable([base, temporary, *_store_files(store, roots), *writable])
    for name, value in os.environ.items():
        if name not in NEVER_LED and not name.startswith("AMPSCOPE_"):
            with contextlib.suppress(OSError, ValueError):
                os.environ[name] = copy.led_text(value)
    if only or len(temporary) < _SHORT:
        os.environ["TMPDIR"] = temporary
    sys.path[:] = [p if _below(p, (sys.prefix,)) else copy.led(p) for p in sys.path]
    return copy


class BusyError(OSError):
    """Another diagnosis compares the same files."""


def _claim(roots: Sequence[str], folder: Path) -> None:
    """Wait until no other run is compared in one of these folders, in or around them: each would
    put back what the other has changed. Raises BusyError where that takes too long."""
    place = Path("/tmp", f"ampscope-compared-{os.getuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        raise OSError(f"{place} is another user's")
    until = time.monotonic() + WAITED_S
    with open(place / "lock", "w") as lock:
        while True:
            fcntl.flock(lock, fcntl.LOCK_EX)
            others = [one for path in place.glob("*.claim") for one in claimed(path)]
            busy = [
                one for one in others if _below(one, roots) or any(_below(r, (one,)) for r in roots)
            ]
            if not busy:
                (folder / CLAIMED).write_text(json.dumps(list(roots)))
                os.symlink(os.path.realpath(folder), place / f"{uuid.uuid4().hex}.claim")
                return
            fcntl.flock(lock, fcntl.LOCK_UN)
            if time.monotonic() > until:
                raise BusyError(
                    f"another diagnosis is at work in {busy[0]}; start this one after it"
                )
            time.sleep(0.1)


def claimed(folder: Path) -> list[str]:
    """The folders that the run has claimed whose view ``folder`` is; where a link leads to a view
    that is gone, the link goes."""
    try:
        return [str(one) for one in json.loads((folder / CLAIMED).read_text())]
    except (OSError, ValueError):
        if folder.is_symlink():
            folder.unlink(missing_ok=True)
        return []


def store_names(store: str) -> frozenset[str]:
    """What lies beside a store and is ampscope's own."""
    ends = ("", "-wal", "-shm", "-journal", ".changed", ".capsules", ".jobs")
    return frozenset(f"{store}{end}" for end in ends if store)


def _store_files(store: Path, roots: Sequence[str]) -> list[str]:
    """What SQLite writes of a store that the caller has open. With another journal than the log it
    makes files, and the folder must be the store's own. Raises OSError."""
    path = str(store.absolute())
    if os.path.exists(f"{path}-wal"):
        return [path, f"{path}-wal", f"{path}-shm"]
    if any(_below(root, (os.path.dirname(path),)) for root in roots):
        raise OSError("the store lies among files that cannot be written")
    return [os.path.dirname(path)]


# ---- Landlock --------------------------------------------------------------------------------

# linux/landlock.h: access rights, and from which version of the interface on they are known.
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = sum(1 << bit for bit in range(4, 13))  # remove and make files of all kinds
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, of the same number on every processor
_NO_NEW_PRIVILEGES = 38  # linux/prctl.h
ALL_WRITES = 3  # the version that hears of truncate(2), too


def landlock_version() -> int:
    """0 where there is none."""
    if sys.platform != "linux":
        return 0
    found = ctypes.CDLL(None).syscall(_CREATE, None, ctypes.c_size_t(0), 1)
    return max(int(found), 0)


def _make_unwritable(but: Iterable[str]) -> None:
    """All files, for this process and what it starts, for good. Raises OSError."""
    version = landlock_version()
    of_files = _WRITE_FILE | (_TRUNCATE if version >= 3 else 0)
    handled = of_files | _CHANGES | (_REFER if version >= 2 else 0)
    attributes = struct.pack("=Q", handled)
    rules = _call(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path in but:
            try:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                rights = handled if stat.S_ISDIR(os.fstat(place).st_mode) else of_files
                _call(_ADD, rules, 1, struct.pack("=Qi", rights, place), 0)
            finally:
                os.close(place)
        if ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError("the process cannot give up its privileges")
        _call(_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    done = int(libc.syscall(number, *arguments))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


# ---- what the user's files were --------------------------------------------------------------


class _Facts(NamedTuple):
    """Of one file, link or folder."""

    mode: int
    size: int
    changed_ns: int
    inode: int
    text: str  # of a link
    owner: str  # and group
    attributes: str  # extended ones


def _walked(
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
                        apart is not None and _is_repository(entry.path)
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
    return _Facts(
        found.st_mode,
        found.st_size,
        found.st_mtime_ns,
        found.st_ino,
        text,
        f"{found.st_uid}:{found.st_gid}",
        json.dumps(_attributes(path)),
    )


def _attributes(path: str) -> dict[str, str]:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            names = sorted(os.listxattr(path, follow_symlinks=False))
            return {n: os.getxattr(path, n, follow_symlinks=False).hex() for n in names}
    return {}


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


def put_back(folder: Path, aside: Path) -> PutBack:
    """Make the user's files what they were before the run whose copy is below ``folder``. What they
    have become is kept in ``aside``: it may be the user's own work, or another program's. A file is
    never written over: what cannot be put back is left, and its backup is kept. Where the run could
    write nothing else, its times and permissions alone are put back."""
    done, told = PutBack(str(aside)), _told(folder)
    if told is None:
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
        partly = _kept_in_part(before, f"{folder}/{_KEPT}")
        for one in partly:
            inside = [path for path, *_ in found if _below(path, (one,))]
            done.left.update(dict.fromkeys([one] if len(inside) > MOST_NAMED else inside, ""))
        found = [one for one in found if not _below(one[0], partly)]
        _put_back(found, f"{folder}/{_KEPT}", done)
        if found or done.restored:
            for path, facts in reversed(folders):
                with contextlib.suppress(OSError):
                    is_there = os.path.isdir(path) and not os.path.islink(path)
                    if is_there and not _below(path, partly):
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
    whole = [p for p, facts in before.items() if _is_repository(p) and stat.S_ISDIR(facts.mode)]
    lost = [p for p, f in before.items() if stat.S_ISREG(f.mode) and not os.path.exists(kept + p)]
    return [one for one in whole if any(_below(path, (one,)) for path in lost)]


def _told(folder: Path) -> Any:
    try:
        return json.loads((folder / _BEFORE).read_text())
    except (OSError, ValueError):  # no copy, or one that was not finished
        return None


_Difference = tuple[str, _Facts | None, _Facts | None]


def _differences(told: Any, before: Mapping[str, _Facts]) -> list[_Difference]:
    """(path, before, now) of what differs; of a folder, its permissions alone: what was made in it
    is named itself. What is new is not known where there was more than one walk sees, below what
    could not be read before, and in what was an installation."""
    now: dict[str, _Facts] = {}
    if len(before) < COMPARED_ENTRIES:
        now.update(_walked(told["roots"], told["store"], None if told["only"] else []))
    for path in before.keys() - now.keys():
        with contextlib.suppress(OSError):
            now[path] = _facts(path)
    found = []
    unknown = {*told["unread"], *(told["apart"] or [])}
    for path in before.keys() | now.keys():
        old, new = before.get(path), now.get(path)
        if old is None and _below(path, unknown):
            continue
        both = bool(old and new and stat.S_ISDIR(old.mode) and stat.S_ISDIR(new.mode))
        if old != new and not (
            both and old and new and (old.mode, *old[5:]) == (new.mode, *new[5:])
        ):
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
    many = len(found) > MOST_NAMED
    return (
        [one for one in told["apart"] if any(_below(f, (one,)) for f in found)] if many else found
    )


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
    kept = f"{folder}/{_KEPT}"
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


# ---- texts -----------------------------------------------------------------------------------

_TEXTS = (".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".env", ".sh", ".txt")
_SMALL, _MANY, _SEEN = 64 << 10, 300, 20_000


def paths_in(text: str) -> list[str]:
    """What looks like an absolute path."""
    return [found for found in _PATH.findall(text) if len(found) > 1]


def small_texts(root: str) -> list[str]:
    """Sources and configurations below a folder."""
    found: list[str] = []
    seen = 0
    for folder, folders, files in os.walk(root):
        seen += len(files)
        folders[:] = [name for name in folders if not is_installed(f"{folder}/{name}")]
        for name in files:
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError):
                if name.endswith(_TEXTS) and os.stat(path).st_size <= _SMALL:
                    found.append(path)
        if len(found) >= _MANY or seen > _SEEN:
            break
    return found[:_MANY]


# ---- files -----------------------------------------------------------------------------------


def is_installed(folder: str) -> bool:
    """An environment, packages or a repository's own data: no script's output."""
    return os.path.exists(f"{folder}/pyvenv.cfg") or folder.endswith(("/.git", "/node_modules"))


def _is_repository(folder: str) -> bool:
    return folder.endswith("/.git")


def copy_file(source: str, target: str) -> None:
    """With its times and permissions; by reference where the file system can."""
    if not _cloned(source, target):
        shutil.copyfile(source, target)
    shutil.copystat(source, target)


def _cloned(source: str, target: str) -> bool:
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


def _is_large(folder: str, most: int = COPIED_ENTRIES) -> bool:
    count = 0
    for _, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        if count > most:
            return True
    return False


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path == f or path.startswith(f.rstrip("/") + "/") for f in folders)
