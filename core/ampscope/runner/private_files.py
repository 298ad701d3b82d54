"""A private copy-on-write view of the files that a script writes. Imports no framework.

The runs of a diagnosis start from the same files, see nothing of one another's, and leave the
user's as they were. :func:`private_files` gives the process that calls it such a view of the
script's *roots*: the project that holds its working folder and its own folder, and what its
arguments point at. docs/decisions/0015 says why it is done in these two ways:

*overlay*, where Linux allows it (a user namespace and a mount namespace of the process's own):
    each root is covered by an overlay file system. Every path stays what it is, and whatever
    writes, native code included, writes into a folder that is thrown away.
*mirror*, elsewhere:
    the script runs in a copy of its roots. Large files and folders in it are links, which become
    copies before the first write; absolute paths into the roots are led to the copy.

What lies outside the roots is shared. :class:`Shared` hears of the first write there, or of a
connection to another machine: such runs are made one at a time, and their report names it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import re
import shutil
import signal
import site
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ampscope.errors import AmpscopeError
from ampscope.records import RunSpec, State
from ampscope.runner.script_text import also_at
from ampscope.store.writer import RunWriter

OVERLAY, MIRROR = "overlay", "mirror"
FORCED = "AMPSCOPE_PRIVATE_FILES"  # overlay or mirror: one of the two only, for tests
LOCK = "shared.lock"  # beside the views of one diagnosis
WAITS = "Stopped before its first write to shared files: it is run again alone."
_MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg", ".hg")
_SYSTEM = ("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys",
           "/usr", "/var", "/opt", "/home", "/mnt", "/media", "/Users", "/private")  # fmt: skip
_TEMPORARY = ("/tmp", "/var/tmp", "/private/tmp")
# A file or folder of a mirror up to this size is copied at once, a larger one is a link at first.
COPIED_BYTES, COPIED_ENTRIES = 64 << 20, 2_000
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR",
           "PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH")  # fmt: skip
_HOME_CACHES = (".cache", ".nv", ".triton", ".config/matplotlib")
# linux/sched.h, linux/mount.h
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000


class NotPossible(Exception):  # noqa: N818  # the machine does not allow it; not a bug
    """This way of having private files does not work here."""


@dataclass(frozen=True, slots=True)
class View:
    """A private view that is in force in this process."""

    kind: str  # overlay or mirror
    roots: tuple[str, ...]
    store: Path  # how ampscope's own store is reached from now on
    workload: str  # the script's file, or ``-m module``
    folder: Path  # where what is written goes


def roots_of(workload: str, cwd: str, args: Sequence[str] = ()) -> list[str]:
    """Folders that a script is likely to write below, none inside another.

    The projects around the working folder and the script's own folder, and the folders that
    arguments name. System folders are none.
    """
    wanted = [_project(cwd)]
    if not workload.startswith("-m "):
        wanted.append(_project(str(Path(workload).resolve().parent)))
    for arg in args:
        path = arg.rpartition("=")[2]
        if path.startswith(("/", "~", "../")):
            full = os.path.realpath(os.path.join(cwd, os.path.expanduser(path)))
            wanted.append(_existing_folder(full))
    kept: list[str] = []
    for path in sorted({os.path.realpath(w) for w in wanted}, key=len):
        if path not in _SYSTEM and os.path.isdir(path) and not _below(path, kept):
            kept.append(path)
    return kept


def private_files(workload: str, args: Sequence[str], store: Path, folder: Path) -> View:
    """Give this process, which must have a single thread, a private view; ``folder`` is its own and
    empty, and thrown away by the caller. Raises NotPossible."""
    roots = roots_of(workload, os.getcwd(), args)
    forced = os.environ.get(FORCED, "")
    if not roots:
        return View(OVERLAY, (), store, workload, folder)
    if forced != MIRROR and sys.platform == "linux":
        try:
            return _overlaid(roots, workload, store, folder)
        except (OSError, NotPossible) as error:
            if forced == OVERLAY:
                raise NotPossible(str(error)) from error
    roots = [root for root in roots if root not in _TEMPORARY]  # full of what others are at work on
    return _mirrored(roots, workload, store, folder)


def mirror_notes(view: View) -> list[str]:
    """What the report says of a run in a mirror: which kind it was, and what got through."""
    if view.kind != MIRROR or _mirror is None:
        return []
    notes = [
        "This machine gives a process no file system of its own: the script ran in a copy of "
        f"{', '.join(view.roots) or 'nothing'}, at other paths."
    ]
    if changed := _mirror.changed():
        notes.append(
            f"{', '.join(changed[:3])} was changed by the run: native code wrote to it by itself."
        )
    return notes


# ---- which folders ---------------------------------------------------------------------------


def _project(folder: str) -> str:
    """The nearest folder above that is a project's; ``folder`` itself where there is none."""
    path = Path(folder).resolve()
    home = Path.home()
    for one in (path, *path.parents):
        if one == home or str(one) in _SYSTEM:
            break
        if any(os.path.exists(one / marker) for marker in _MARKERS):
            return str(one)
    return str(path)


def _existing_folder(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path == f or path.startswith(f.rstrip("/") + "/") for f in folders)


# ---- overlay ---------------------------------------------------------------------------------


def _overlaid(roots: list[str], workload: str, store: Path, folder: Path) -> View:
    folder.mkdir(parents=True, exist_ok=True)
    cwd = os.getcwd()
    in_user_namespace = _own_namespace()
    # Opened in the new namespace: what belongs to another cannot be bound (EINVAL).
    lower = {root: _folder_descriptor(root) for root in _with_mounts(roots)}
    kept = _folder_descriptor(str(store.absolute().parent))
    shared = {c: _folder_descriptor(c) for c in _caches() if _below(c, roots) and os.path.isdir(c)}
    covered: list[str] = []
    upper = folder if not _below(str(folder.resolve()), roots) else None
    places = _Places(folder, upper)
    try:
        for root, descriptor in lower.items():
            _cover(root, descriptor, places, in_user_namespace)
            covered.append(root)
        for cache, descriptor in shared.items():
            _mount(f"/proc/self/fd/{descriptor}", cache, "", _BIND | _REC)
        bound = folder / "store"
        bound.mkdir(parents=True)
        _mount(f"/proc/self/fd/{kept}", str(bound), "", _BIND)
    except BaseException:
        # Half a view is worse than none: the store itself may lie below a root that is covered.
        for root in reversed(covered):
            _unmount(root)
        os.chdir(cwd)
        raise
    finally:
        places.close()
        for descriptor in (*lower.values(), *shared.values(), kept):
            os.close(descriptor)
    os.chdir(cwd)  # by its path: the old one lies below the overlay
    return View(OVERLAY, tuple(roots), bound / store.name, workload, folder)


def _folder_descriptor(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


class _Places:
    """Where overlays put what is written: on the disk, or in memory where the disk cannot be it
    (a container's root is an overlay itself; a folder below a root would hold itself)."""

    def __init__(self, folder: Path, disk: Path | None) -> None:
        # Held open: once a root above it is covered, its path leads into the overlay.
        self._disk = None if disk is None else _folder_descriptor(str(disk))
        self._memory: int | None = None
        self._mount_point = folder / "memory"
        self._mount_point.mkdir()
        self._count = 0

    def next(self, *, in_memory: bool) -> tuple[int, int] | None:
        """File descriptors of an upper and a work folder, both empty."""
        base = self._disk
        if in_memory:
            if self._memory is None:
                _mount("tmpfs", str(self._mount_point), "tmpfs", 0, "mode=700")
                self._memory = _folder_descriptor(str(self._mount_point))
            base = self._memory
        if base is None:
            return None
        made = []
        for name in ("upper", "work"):
            os.mkdir(f"{name}{self._count}", dir_fd=base)
            made.append(os.open(f"{name}{self._count}", os.O_RDONLY | os.O_DIRECTORY, dir_fd=base))
        self._count += 1
        return made[0], made[1]

    def close(self) -> None:
        """The mounts keep what they need."""
        for descriptor in (self._disk, self._memory):
            if descriptor is not None:
                os.close(descriptor)


def _cover(root: str, lower: int, places: _Places, in_user_namespace: bool) -> None:
    """Mount an overlay over ``root``. Raises OSError for the last reason."""
    last = OSError("no place for what is written")
    for in_memory in (False, True):
        found = places.next(in_memory=in_memory)
        if found is None:
            continue
        upper, work = found
        mode = os.fstat(lower).st_mode
        os.fchmod(upper, stat.S_IMODE(mode))
        options = (
            f"lowerdir=/proc/self/fd/{lower},upperdir=/proc/self/fd/{upper},"
            f"workdir=/proc/self/fd/{work}"
        )
        try:
            for more in (",userxattr", "") if in_user_namespace else ("", ",userxattr"):
                try:
                    _mount("overlay", root, "overlay", 0, options + more)
                    return
                except OSError as error:
                    last = error
        finally:
            os.close(upper)
            os.close(work)
    raise last


def _with_mounts(roots: list[str]) -> list[str]:
    """The roots and every file system that is mounted below one, parents first: an overlay does not
    show what is mounted below its folder."""
    found = list(roots)
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            # Spaces and the like are written as octal numbers (proc_pid_mountinfo(5)).
            octal = re.sub(rb"\\(\d{3})", lambda m: bytes([int(m[1], 8)]), line.split()[4])
            place = os.fsdecode(octal)
            if place not in found and _below(place, roots) and os.path.isdir(place):
                found.append(place)
    return sorted(found, key=len)


def _own_namespace() -> bool:
    """A mount namespace for this process alone; whether it took a user namespace to have it."""
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    in_user_namespace = False
    if libc.unshare(_NEWNS):
        if libc.unshare(_NEWUSER | _NEWNS):
            raise OSError(ctypes.get_errno(), "no namespace for the process")
        in_user_namespace = True
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", "/", "", _REC | _PRIVATE)
    return in_user_namespace


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        os.fsencode(options) or None,
    )
    if done:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _unmount(target: str) -> None:
    detach = 2  # MNT_DETACH of linux/fs.h: also while a file of it is open
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(target), detach)


# ---- mirror ----------------------------------------------------------------------------------

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FICLONE = 0x40049409  # linux/fs.h: share another file's blocks until one of the two is written
# Functions of ``os`` by the number of paths that they take first.
_ONE_PATH = ("stat", "lstat", "listdir", "scandir", "mkdir", "remove", "unlink", "rmdir", "chdir",
             "open", "access", "chmod", "utime", "truncate", "readlink", "chown",
             "statvfs")  # fmt: skip
_TWO_PATHS = ("rename", "replace", "link", "symlink")
_CHANGES = {  # audit event -> which of its arguments are paths that change
    "os.mkdir": (0,), "os.remove": (0,), "os.rmdir": (0,), "os.rename": (0, 1), "os.link": (1,),
    "os.symlink": (1,), "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,),
    "os.setxattr": (0,), "shutil.rmtree": (0,), "sqlite3.connect": (0,),
}  # fmt: skip
_MAKES = ("tempfile.mkstemp", "tempfile.mkdtemp")
# Asked first of each event, because id() is one as well: thousands in a step.
_HEARD = frozenset({"open", "socket.connect", *_MAKES, *_CHANGES})


def _mirrored(roots: list[str], workload: str, store: Path, folder: Path) -> View:
    base = folder.absolute() / "files"
    mirror = Mirror(str(base), tuple(roots), str(store.absolute()))
    for root in roots:
        mirror.copy(root, mirror.base + root)
    cwd = os.getcwd()
    mirror.install()
    os.chdir(mirror.lead(cwd))
    if not workload.startswith("-m "):
        workload = mirror.lead(str(Path(workload).absolute()))
    global _mirror
    _mirror = mirror
    return View(MIRROR, tuple(roots), store, workload, folder)


_mirror: Mirror | None = None


def mirror_text() -> str:
    """What :func:`rejoin` needs in a process that this one starts. "" without a mirror: an overlay
    is inherited. It is handed over by hand: a script may empty its environment."""
    return "" if _mirror is None else json.dumps([_mirror.base, _mirror.roots, _mirror.store])


def rejoin(text: str) -> None:
    """Lead the paths of this process to the mirror of the one that has started it, if it has one;
    what was replaced before a fork is inherited."""
    global _mirror
    if _mirror is None and text:
        base, roots, store = json.loads(text)
        _mirror = Mirror(base, tuple(roots), store)
        _mirror.install()


class Mirror:
    """A copy of ``roots`` below ``base``, at the same paths, made in full where it is written."""

    def __init__(self, base: str, roots: tuple[str, ...], store: str) -> None:
        self.base = base
        self.store = store  # ampscope's own file is no file of the script's, wherever it lies
        self.roots = roots
        self.linked: dict[str, tuple[int, int]] = {}  # file of the user's -> (size, mtime in ns)

    def lead(self, path: Any) -> Any:
        """Where a path leads from inside the mirror; what is no path is returned unchanged."""
        try:
            text = os.fsdecode(path)
        except TypeError:
            return path
        full = os.path.normpath(os.path.join(_getcwd(), text))
        if full.startswith(self.store):  # with -wal and -shm behind it too
            return path
        if _below(full, (self.base,)):
            real = full[len(self.base) :] or "/"
            return path if _below(real, self.roots) else _as(path, real)
        return _as(path, self.base + full) if _below(full, self.roots) else path

    def own(self, path: str, *, empty: bool = False) -> None:
        """Make what lies at ``path`` the mirror's own before it is changed; ``empty``: its contents
        are about to be thrown away."""
        full = os.path.normpath(os.path.join(_getcwd(), path))
        root = next((r for r in self.roots if _below(full, (self.base + r,))), None)
        if root is None:
            return
        place = self.base + root
        rest = full[len(place) :].strip("/")
        for part in rest.split("/") if rest else ():
            place = f"{place}/{part}"
            target = self._link(place)
            if target is None:
                continue
            os.unlink(place)
            if os.path.isdir(target):
                self.copy(target, place, depth=1)
            elif not (empty and place == full):
                _copy_file(target, place)

    def install(self) -> None:
        """Lead paths of Python's own functions; see :meth:`own` before each change. For good, and
        therefore without `ampscope.patches`: the process runs one script and ends."""
        import builtins
        import io

        for name in _ONE_PATH:
            self._wrap(os, name, 1)
        for name in _TWO_PATHS:
            self._wrap(os, name, 2)
        self._wrap(io, "open", 1)
        builtins.open = io.open
        if "sqlite3" in sys.modules:
            self._wrap(sys.modules["sqlite3"], "connect", 1)
        sys.addaudithook(self._heard)

    def changed(self) -> list[str]:
        """Linked files of the user's that something has changed nevertheless."""
        found = []
        for path, seen in self.linked.items():
            try:
                now = os.stat(path)
            except OSError:
                found.append(path)
                continue
            if (now.st_size, now.st_mtime_ns) != seen:
                found.append(path)
        return found

    def _wrap(self, owner: Any, name: str, paths: int) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            moved = [a if isinstance(a, int) else self.lead(a) for a in args[:paths]]
            if name == "symlink" and args:
                moved[0] = args[0]  # the text of a link is no path that is opened
            for key in ("path", "src", "dst", "file"):
                if key in kwargs and not isinstance(kwargs[key], int):
                    kwargs[key] = self.lead(kwargs[key])
            return original(*moved, *args[paths:], **kwargs)

        setattr(owner, name, wrapper)
        for known in (
            os.supports_fd,
            os.supports_dir_fd,
            os.supports_follow_symlinks,
            os.supports_effective_ids,
        ):
            if original in known:
                known.add(wrapper)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _HEARD:
            return
        if event == "open":
            path, mode, flags = args
            if isinstance(path, int) or not _writes(mode, flags):
                return
            self._own_quietly(path, empty=bool((flags or 0) & os.O_TRUNC))
        else:
            for place in _CHANGES.get(event, ()):
                # What is moved or deleted goes as the link that it is; its folder must be our own.
                moves = event in ("os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink")
                path = args[place]
                self._own_quietly(_parent(path) if moves else path)

    def _own_quietly(self, path: Any, *, empty: bool = False) -> None:
        with contextlib.suppress(TypeError):
            self.own(os.fsdecode(path), empty=empty)

    def _link(self, place: str) -> str | None:
        """What a link of the mirror's own making points at; None for anything else."""
        try:
            target = _readlink(place)
        except OSError:
            return None
        return target if os.path.isabs(target) and _below(target, self.roots) else None

    def copy(self, source: str, target: str, depth: int = 0) -> None:
        """Copy a folder: small files and, at ``depth`` 0, small folders; links to all others."""
        os.makedirs(target, exist_ok=True)
        with _scandir(source) as found:
            entries = list(found)
        for entry in entries:
            place = f"{target}/{entry.name}"
            if entry.is_symlink():
                text = _readlink(entry.path)
                inside = os.path.isabs(text) and _below(text, self.roots)
                os.symlink(self.base + text if inside else text, place)
            elif entry.is_dir():
                if depth or self._is_large(entry.path):
                    os.symlink(entry.path, place)
                else:
                    self.copy(entry.path, place)
            elif entry.is_file():
                self._file(entry, place)
        with contextlib.suppress(OSError):
            shutil.copystat(source, target)

    def _file(self, entry: os.DirEntry[str], place: str) -> None:
        facts = entry.stat()
        if facts.st_size <= COPIED_BYTES or _reflinked(entry.path, place):
            _copy_file(entry.path, place)
        else:
            self.linked[entry.path] = (facts.st_size, facts.st_mtime_ns)
            os.symlink(entry.path, place)

    def _is_large(self, folder: str) -> bool:
        """Too many files to look at, or an installation: linked as one."""
        if os.path.exists(f"{folder}/pyvenv.cfg") or folder.endswith(("/.git", "/node_modules")):
            return True
        count = 0
        for _, folders, files in os.walk(folder):
            count += len(folders) + len(files)
            if count > COPIED_ENTRIES:
                return True
        return False


_getcwd, _readlink, _scandir = os.getcwd, os.readlink, os.scandir


def _as(like: Any, path: str) -> Any:
    return os.fsencode(path) if isinstance(like, bytes) else path


def _parent(path: Any) -> str:
    return os.path.dirname(os.path.normpath(os.path.join(_getcwd(), os.fsdecode(path))))


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str) and set("wax+") & set(mode):
        return True
    return bool((flags or 0) & _WRITING)


def _reflinked(source: str, target: str) -> bool:
    """Whether the two files now share their blocks (btrfs, xfs)."""
    try:
        with open(source, "rb") as old, open(target, "wb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(target)
        return False
    return True


def _copy_file(source: str, target: str) -> None:
    if not os.path.exists(target):
        shutil.copyfile(source, target)
    shutil.copystat(source, target)


# ---- what is shared --------------------------------------------------------------------------


class Shared:
    """Hears of what a run changes outside its view. ``names`` are for the report; ``lock`` is a
    file that is open, and that the first of several runs to write outside locks until it ends;
    it writes its ``run_id`` there."""

    def __init__(self, view: View, lock: int, run_id: str, on_second: Callable[[], None]) -> None:
        self.names: list[str] = []
        self._run_id = run_id
        self._view = view
        self._lock = lock
        self._on_second = on_second  # another run has written there first, and still runs
        self._is_held = False
        self._busy = False
        self._announced: list[str] = []  # made by tempfile: names that no other run has
        self._own = [str(view.folder)]
        self._own += [f"{view.store}{end}" for end in ("", "-wal", "-shm", "-journal")]
        self._exempt = _exempt()
        self._pid = os.getpid()

    def listen(self) -> None:
        """From now on, for good."""
        sys.addaudithook(self._heard)

    def note(self) -> str:
        """One sentence for the report; "" when nothing was shared."""
        if not self.names:
            return ""
        more = f" and {len(self.names) - 4} more" if len(self.names) > 4 else ""
        return (
            f"The script changes {', '.join(self.names[:4])}{more}, of which its runs cannot have "
            "copies of their own: they were made one at a time, and each finds what the one before "
            "left there."
        )

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _HEARD or self._busy or os.getpid() != self._pid:
            return
        if event == "open":
            if isinstance(args[0], int) or not _writes(args[1], args[2]):
                return
            if os.path.isdir(args[0]):
                return  # tempfile says so before its opener opens a file there, which is heard too
            paths: tuple[Any, ...] = (args[0],)
        elif event in _MAKES:
            self._announced.append(os.path.abspath(os.fsdecode(args[0])))
            return
        elif event == "socket.connect":
            self._connects(args[1])
            return
        else:
            paths = tuple(args[place] for place in _CHANGES[event])
        for path in paths:
            with contextlib.suppress(TypeError, ValueError):
                self._writes(os.fsdecode(path))

    def _writes(self, path: str) -> None:
        if path == ":memory:" or path.startswith("file:"):
            return
        self._busy = True
        try:
            full = os.path.realpath(path)
            own = (*self._view.roots, *self._own, *self._exempt, *self._announced)
            if not _below(full, own):
                self._outside(full)
        finally:
            self._busy = False

    def _connects(self, address: Any) -> None:
        if not isinstance(address, tuple) or not address:
            return
        host = str(address[0])
        if host.startswith("127.") or host in ("localhost", "::1", "0.0.0.0", ""):
            return
        self._busy = True
        try:
            self._outside(f"what lies behind {host}")
        finally:
            self._busy = False

    def _outside(self, name: str) -> None:
        if name in self.names:
            return
        self.names.append(name)
        if self._is_held:
            return
        self._is_held = True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._on_second()
        else:
            os.write(self._lock, f"{self._run_id}\n".encode())


@dataclass(frozen=True, slots=True)
class Adopted:
    """A queued run of a script that this process has taken: where it writes, and what it runs."""

    writer: RunWriter
    store: Path
    spec: RunSpec
    notes: Callable[[], tuple[str, ...]]  # on its files


def adopted(store: Path, run_id: str, spec: RunSpec, folder: Path | None) -> Adopted | None:
    """Take the run, with a view of its files below ``folder``; without one it writes for real. None
    where there can be no such view, which the run then says."""
    if folder is None:
        writer = RunWriter(store, run_id)
        writer.adopt()
        return Adopted(writer, store, spec, tuple)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        lock = os.open(folder.with_name(LOCK), flags, 0o600)
        view = private_files(spec.workload, spec.args, store, folder)
    except (OSError, NotPossible) as error:
        writer = RunWriter(store, run_id)
        writer.adopt()
        writer.finish(State.FAILED, f"The run could not have files of its own: {error}.")
        return None
    also_at(spec.workload, view.workload)
    writer = RunWriter(view.store, run_id)
    writer.adopt()
    shared = Shared(view, lock, run_id, partial(wait_for_the_other, writer))
    shared.listen()

    def notes() -> tuple[str, ...]:
        return tuple(filter(None, (shared.note(), *mirror_notes(view))))

    return Adopted(writer, view.store, replace(spec, workload=view.workload), notes)


def wait_for_the_other(writer: RunWriter) -> None:
    """Another run has begun to change what both would share: this one is made again later."""
    with contextlib.suppress(AmpscopeError):
        writer.finish(State.FAILED, WAITS)
    os.kill(os.getpid(), signal.SIGKILL)


def _caches() -> list[str]:
    """Where downloads and compiled kernels are kept for every run to find."""
    found = [os.path.expanduser(f"~/{name}") for name in _HOME_CACHES]
    return [*found, *(os.environ[name] for name in _CACHES if os.environ.get(name))]


def _exempt() -> list[str]:
    """Folders that may be shared: devices, Python's own files, and caches."""
    found = ["/dev", "/proc", "/sys", sys.prefix, sys.base_prefix, *site.getsitepackages()]
    found += _caches()
    temporary = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        found += [
            f"{temporary}/{name}"
            for name in os.listdir(temporary)
            if name.startswith(("torchinductor_", "pymp-"))
        ]
    return [os.path.realpath(path) for path in found]
