"""A plain copy of the folders that a script writes, where the system gives a process no file system
of its own. Imports no framework.

The script runs in the copy, at other paths: its working folder, its own file, and what arguments
and the environment name lead there. Landlock (Linux 6.2) makes everything else unwritable for the
process and all that it starts. Where there is none, the user's files are compared after the run and
put back (:mod:`ampscope.runner.put_back`), from a second copy that nothing is led to.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
from collections.abc import Iterable, Sequence
from pathlib import Path

from ampscope.files import is_below
from ampscope.runner.put_back import (
    CLAIMED,
    KEPT,
    cloned,
    copy_file,
    is_installed,
    is_repository,
    remember,
    store_names,
    walked,
)

# A file up to this size is copied, a larger one while the sum is below the second number. What is
# not copied is a link.
COPIED_BYTES, LARGE_BYTES = 64 << 20, 1 << 30
NAMED_SMALL, NAMED_BYTES = 1 << 20, 32 << 20  # the same of folders that are only named somewhere
COPIED_ENTRIES = 2_000  # in a folder, all levels: above it files are links
LINKS = 20_000  # in one copy; a folder that needs more is a link, or its direct entries are
ALL_BYTES, ALL_FILES = 4 << 30, 50_000  # of the copied files up to COPIED_BYTES, smallest first
_SHORT = 72  # of a temporary folder: sockets are made there, whose paths have at most 103 bytes
WAITED_S = 60.0  # for another diagnosis; less than what a run itself may take
# What they name is no place of output; PWD may be out of date.
NOT_NAMED = ("PWD", "OLDPWD", "PYTHONPATH", "CONDA_PREFIX", "SHELL", "_")
NEVER_LED = ("HOME", "PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
# A path in an argument begins at its start, behind a sign, or behind a short option (``-o/a``).
_SIGNS = r"\s=,;:\"'{}\[\]()"
PATH = re.compile(rf"(?:^|(?<=[{_SIGNS}])|(?<=^-\w))(?:~(?=/|$)|/)[^{_SIGNS}]*")


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
            for path, facts in walked([self.base + root for root in self.roots], "", []):
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
                elif not cloned(source, target):
                    os.symlink(source, target)
        self._files.clear()

    def led(self, path: str) -> str:
        """Where a path leads from inside the copy."""
        real = os.path.realpath(path)
        if is_below(real, self.roots) or {real, os.path.dirname(real)} & set(self._plain):
            return self.base + real
        return path

    def led_text(self, text: str) -> str:
        """The same for each path in an argument or a variable."""
        head, equals, whole = text.rpartition("=")
        if whole.startswith("/") and os.path.lexists(whole):  # with blanks or commas in it
            return f"{head}{equals}{self.led(whole)}"
        return PATH.sub(lambda m: self._led_if_below(m[0]), text)

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
        if is_below(self.base, (source,)) or source in self._first:
            return  # the copy would hold itself; it is there
        if any(is_below(first, (source,)) for first in self._first):
            with contextlib.suppress(PermissionError):  # the script may stand below all the same
                self._folder(source, target, linked=linked, depth=depth)
            return
        is_git = self._with_git and is_repository(source)
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
        is_own = os.access(real, os.W_OK) and depth < 2 and not is_below(self.base, (real,))
        if is_below(real, self.roots):
            os.symlink(self.base + real, target)
        elif is_own and os.path.isdir(real):
            if any(is_below(root, (real,)) for root in self.roots):  # to what holds the project
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
        if is_apart or (linked and not cloned(source, target)):
            self._links -= 1
            os.symlink(source, target)
        else:
            self._files.append((facts.st_size, source, target))


def _is_large(folder: str, most: int = COPIED_ENTRIES) -> bool:
    count = 0
    for _, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        if count > most:
            return True
    return False


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
    written from now on; otherwise the user's files need
    :func:`ampscope.runner.put_back.put_back` afterwards. Raises OSError."""
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
    copy.make("" if only else f"{os.path.realpath(folder)}/{KEPT}")
    # What only a variable names is not compared: the script is led to the copy, and other programs
    # are at work there, whose files must not be put back.
    roots = copy.roots if only else (*roots, *named)
    remember(roots, folder, str(store.absolute()), temporary, only=only)
    # Its first version lets no file be renamed from one folder to another.
    if only or landlock_version() == 2:
        _make_unwritable([base, temporary, *_store_files(store, roots), *writable])
    for name, value in os.environ.items():
        if name not in NEVER_LED and not name.startswith("AMPSCOPE_"):
            with contextlib.suppress(OSError, ValueError):
                os.environ[name] = copy.led_text(value)
    if only or len(temporary) < _SHORT:
        os.environ["TMPDIR"] = temporary
    sys.path[:] = [p if is_below(p, (sys.prefix,)) else copy.led(p) for p in sys.path]
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
                one
                for one in others
                if is_below(one, roots) or any(is_below(r, (one,)) for r in roots)
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


def _store_files(store: Path, roots: Sequence[str]) -> list[str]:
    """What SQLite writes of a store that the caller has open. With another journal than the log it
    makes files, and the folder must be the store's own. Raises OSError."""
    path = str(store.absolute())
    if os.path.exists(f"{path}-wal"):
        return [path, f"{path}-wal", f"{path}-shm"]
    if any(is_below(root, (os.path.dirname(path),)) for root in roots):
        raise OSError("the store lies among files that cannot be written")
    return [os.path.dirname(path)]


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
