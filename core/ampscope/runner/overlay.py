"""A file system of this process's own, where Linux allows it: every folder shows what was there,
and what is written goes to a place that is thrown away. Imports no framework.

The process leaves the mount namespace that it was started in (with a user namespace where it is not
root's). Then every folder of ``/`` and every file system below is covered by an overlay. Paths stay
what they are, and whatever writes is covered: native code, other programs, a path out of a
configuration, a link out of the project. ``/`` itself can be written no more, and neither can a
file system that no overlay goes over. Shared with all other processes are ``/dev`` but for shared
memory, ``/proc``, ``/sys``, the folders that the caller names, and sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ampscope.files import is_below

# linux/sched.h, linux/mount.h
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _REC, _SLAVE = 0x1, 0x20, 0x1000, 0x4000, 1 << 19
_RELATIME = 1 << 21
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DETACH = 2  # MNT_DETACH: also while a file of it is open
KERNEL = ("/dev", "/proc", "/sys")
SHARED_MEMORY = os.path.realpath("/dev/shm")  # of a name: shm_overview(7), sem_overview(7)
# Where the store's folder is bound: no script cleans there, as some do in the temporary folder.
_STORE = ("/proc/fs", "/proc/driver", "/proc/tty")
INSTALLED = ("/usr", "/etc", "/boot", "/bin", "/lib", "/lib64", "/sbin")
# Folders and levels in which a user's folders are looked for, entries seen there, and seconds.
_SEARCHED, _DEEP, _SEEN, _WITHIN_S = 5_000, 4, 200_000, 1.5
_REMOTE = (b"autofs", b"nfs", b"nfs4", b"cifs", b"smb3", b"9p", b"ceph", b"lustre", b"beegfs",
           b"gpfs", b"afs", b"fuse.sshfs")  # fmt: skip


def overlaid(roots: Sequence[str], shared: Iterable[str], store: Path, folder: Path) -> Path:
    """Give this process, which must have a single thread, a file system of its own, whose changes
    go to ``folder``. ``roots`` are where a script writes most: there it must be able to, and on the
    disk. Returns the path of ``store`` from now on. Raises OSError, with all as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    cwd = os.getcwd()
    as_user = _own_namespace()
    used = [path for path in (tempfile.gettempdir(), cwd) if os.access(path, os.W_OK)]
    needed: set[str] = set()
    with _many_open_files(), contextlib.ExitStack() as opened:

        def paths_of(places: Iterable[str]) -> dict[str, int]:
            # Opened in the new namespace: what belongs to another cannot be bound (EINVAL).
            found = {}
            for place in places:
                with _may_be_gone(place not in needed):
                    found[place] = os.open(place, os.O_PATH | os.O_CLOEXEC)
                    opened.callback(os.close, found[place])
            return found

        mounts = _mount_points()
        covered = {*_top_folders(), *(m for m in mounts if os.path.isdir(m))}
        split: list[str] = []
        if as_user:
            remote = set(_mount_points(_REMOTE))
            remote -= {place for place in remote if any(is_below(r, (place,)) for r in roots)}
            covered |= set(_own_folders(covered, sorted(remote)))
            split = _split(covered, mounts)
        whole = covered.difference(split)
        needed.update(_widest(root, whole, folder, as_user=as_user) for root in roots)
        needed.update(place for place in (SHARED_MEMORY,) if os.path.isdir(place))
        covered |= needed
        lower = paths_of(place for place in sorted(covered, key=len) if _is_there(place))
        kept = [c for c in shared if _is_there(c)]
        kept += [m for m in mounts if _is_there(m) and not os.path.isdir(m)] + _sockets()
        bound = paths_of(place for place in kept if not is_below(place, KERNEL))
        beside = os.open(store.absolute().parent, os.O_PATH | os.O_CLOEXEC)
        opened.callback(os.close, beside)
        places = _Places(folder, opened)
        done: list[str] = []
        try:
            # Before anything is covered: the store's folder may be one of these places itself, and
            # a recursive bind takes along what is mounted on it.
            found = _bind_first(beside, _STORE)
            done.append(found)
            for place, below in lower.items():
                with _may_be_gone(place not in needed and place not in mounts):
                    if place not in split:
                        _cover(place, below, places, must=place in needed, as_user=as_user)
                        done.append(place)
                    elif place in needed:
                        raise OSError(f"another file system is mounted below {place}")
                    elif os.access(place, os.W_OK):
                        _mount(f"/proc/self/fd/{below}", place, "", _BIND | _REC)
                        done.append(place)
                        _make_read_only(place)
            for place, below in bound.items():
                with _may_be_gone(place not in mounts):
                    _mount(f"/proc/self/fd/{below}", place, "", _BIND | _REC)
                    done.append(place)
                    if place in mounts and place not in shared:
                        _make_read_only(place)  # one file, which cannot have an overlay
            for path in used:
                if not os.access(path, os.W_OK):
                    raise OSError(f"nothing could be written in {path}")
            if os.access("/", os.W_OK):
                _make_read_only("/")  # the last step: it is not undone
        except BaseException:
            # Half of it is worse than none: the store itself may lie below what is covered.
            for place in reversed(done):
                _unmount(place)
            os.chdir(cwd)
            raise
    os.chdir(cwd)  # by its path: the old one lies below the overlay
    return Path(found) / store.name


def _top_folders() -> list[str]:
    with os.scandir("/") as found:
        names = [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
    return [path for path in names if path not in KERNEL]


def _mount_points(kinds: Sequence[bytes] = ()) -> list[str]:
    """Of all file systems but the kernel's own, or of those of some ``kinds``; an overlay does not
    show what is mounted below its folder."""
    found = []
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            # Spaces and the like are written as octal numbers (proc_pid_mountinfo(5)).
            octal = re.sub(rb"\\(\d{3})", lambda m: bytes([int(m[1], 8)]), line.split()[4])
            place = os.fsdecode(octal)
            kind = line.partition(b" - ")[2].split()[0]
            if place != "/" and not is_below(place, KERNEL) and (not kinds or kind in kinds):
                found.append(place)
    return found


def _own_folders(covered: Iterable[str], but: Sequence[str]) -> Iterator[str]:
    """Folders that this user may write, below those of others: in a user namespace, which knows one
    user, an overlay cannot copy the folder of another, and could not be written below it. ``but``:
    places that are slow to look into. It ends within _WITHIN_S."""
    apart, seen, until = (*INSTALLED, *but), 0, time.monotonic() + _WITHIN_S
    left = [(place, 0) for place in sorted(covered) if not is_below(place, apart)]
    for place, depth in left:
        with contextlib.suppress(OSError), os.scandir(place) as found:
            for entry in found if os.stat(place).st_uid != os.geteuid() else ():
                seen += 1
                if seen > _SEEN or time.monotonic() > until:
                    return
                if entry.path not in but and entry.is_dir(follow_symlinks=False):
                    if os.access(entry.path, os.W_OK):
                        yield entry.path
                    if depth < _DEEP and len(left) < _SEARCHED:
                        left.append((entry.path, depth + 1))


def _split(covered: set[str], mounts: Sequence[str]) -> list[str]:
    """Take the folders below which another file system is mounted: a user's overlay cannot go over
    them (mount_namespaces(7), locked mounts). What lies in each is added to ``covered``."""
    found: list[str] = []
    left = sorted(covered)
    for place in left:
        if any(mount != place and is_below(mount, (place,)) for mount in mounts):
            found.append(place)
            with contextlib.suppress(OSError), os.scandir(place) as inner:
                left += [entry.path for entry in inner if entry.is_dir(follow_symlinks=False)]
    covered |= set(left)
    return found


def _widest(root: str, covered: Iterable[str], folder: Path, *, as_user: bool) -> str:
    """The highest folder above a root that one overlay on the disk can cover together with it: a
    file cannot be renamed out of one overlay into another. It holds not ``folder``; and a user's
    own are all from there to the root."""
    above = max((place for place in covered if is_below(root, (place,))), key=len, default=root)
    view, found = os.path.realpath(folder), root
    while found != above:
        higher = os.path.dirname(found)
        if is_below(view, (higher,)) or (as_user and os.stat(higher).st_uid != os.geteuid()):
            break
        found = higher
    return found


def _sockets() -> list[str]:
    """Sockets that something listens at: an overlay passes no connection on to them."""
    found = set()
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as lines:
        for line in lines:
            named = re.match(rb"(?:\S+ +){6}\d+ (/.*)", line)
            with contextlib.suppress(OSError):
                if named and stat.S_ISSOCK(os.lstat(named[1]).st_mode):
                    found.add(os.path.realpath(os.fsdecode(named[1])))
    return sorted(found)


@contextlib.contextmanager
def _may_be_gone(may_be: bool) -> Iterator[None]:
    """Other programs remove files in a temporary folder at any time."""
    try:
        yield
    except OSError as error:
        if not may_be or error.errno not in (errno.ENOENT, errno.ESTALE):
            raise


@contextlib.contextmanager
def _many_open_files() -> Iterator[None]:
    """As many as the system allows: each place that is covered is held open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _is_there(place: str) -> bool:
    """Whether this user can come to it; where not, nothing there can be written either."""
    try:
        os.stat(place)
    except OSError:
        return False
    return True


class _Places:
    """Where overlays put what is written: on the disk, or in memory where the disk cannot be it
    (a container's root is an overlay itself; a folder below a covered one would hold itself)."""

    def __init__(self, folder: Path, opened: contextlib.ExitStack) -> None:
        # Held open: once a folder above it is covered, its path leads into the overlay.
        self._folder = os.path.realpath(folder)
        self._opened = opened
        self._disk = self._base(self._folder)
        self._memory: int | None = None
        self._count = 0

    def next(self, place: str, *, in_memory: bool) -> tuple[int, int] | None:
        """File descriptors of an upper and a work folder, both empty, for an overlay at a place.
        The caller closes them."""
        base = self._disk
        if in_memory:
            if self._memory is None:
                point = f"{self._folder}/memory"
                os.mkdir(point)
                _mount("tmpfs", point, "tmpfs", 0, "mode=700")
                self._memory = self._base(point)
            base = self._memory
        elif place == SHARED_MEMORY or is_below(self._folder, (place,)):
            return None
        made = []
        for name in ("upper", "work"):
            os.mkdir(f"{name}{self._count}", dir_fd=base)
            made.append(os.open(f"{name}{self._count}", _FOLDER, dir_fd=base))
        self._count += 1
        return made[0], made[1]

    def _base(self, path: str) -> int:
        found = os.open(path, _FOLDER)
        self._opened.callback(os.close, found)
        return found


def _cover(place: str, lower: int, places: _Places, *, must: bool, as_user: bool) -> None:
    """Mount an overlay over a folder. What no overlay goes over is made read-only, unless it
    ``must`` be one. Raises OSError for the last reason."""
    here = f"/proc/self/fd/{lower}"
    if os.statvfs(here).f_flag & os.ST_RDONLY and not must:
        _mount(here, place, "", _BIND)
        return
    last = OSError("no place for what is written")
    for in_memory in (False, True):
        found = places.next(place, in_memory=in_memory)
        if found is None:
            continue
        upper, work = found
        try:
            os.fchmod(upper, stat.S_IMODE(os.stat(here).st_mode))
            options = f"lowerdir={here},upperdir=/proc/self/fd/{upper},workdir=/proc/self/fd/{work}"
            # With redirect_dir, a folder that was there before can be renamed; users may not have
            # it.
            for more in (",userxattr", "") if as_user else (",redirect_dir=on", "", ",userxattr"):
                try:
                    _mount("overlay", place, "overlay", 0, options + more)
                    return
                except OSError as error:
                    last = error
        finally:
            os.close(upper)
            os.close(work)
    if must:
        raise last
    _mount(here, place, "", _BIND)
    try:
        _make_read_only(place)
    except BaseException:
        _unmount(place)
        raise


def _bind_first(source: int, targets: Sequence[str]) -> str:
    """Bind the folder at the first of the targets that takes it."""
    for target in targets:
        with contextlib.suppress(OSError):
            _mount(f"/proc/self/fd/{source}", target, "", _BIND | _REC)
            return target
    raise OSError("no place for the store")


def _make_read_only(place: str) -> None:
    """The mount of a place; its other flags must stay (mount(2), user namespaces)."""
    kept = os.statvfs(place).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    kept |= os.statvfs(place).f_flag & (os.ST_NOATIME | os.ST_NODIRATIME)
    kept |= _RELATIME if os.statvfs(place).f_flag & os.ST_RELATIME else 0
    _mount("none", place, "", _REMOUNT | _BIND | _READ_ONLY | kept)


def _own_namespace() -> bool:
    """A mount namespace for this process alone; whether it took a user namespace to have it."""
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    as_user = False
    if libc.unshare(_NEWNS):
        # Where a user namespace can be made and not written (Ubuntu 24.04), there is no way back.
        if not (child := os.fork()):
            try:
                _enter_user_namespace(libc, uid, gid)
            except BaseException:
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise OSError("no namespace for the process")
        _enter_user_namespace(libc, uid, gid)
        as_user = True
    _mount("none", "/", "", _REC | _SLAVE)  # what the system mounts later appears here, too
    return as_user


def _enter_user_namespace(libc: ctypes.CDLL, uid: int, gid: int) -> None:
    if libc.unshare(_NEWUSER | _NEWNS):
        raise OSError(ctypes.get_errno(), "no namespace for the process")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", "/", "", _REC | _SLAVE)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    what, where, given = os.fsencode(source), os.fsencode(target), os.fsencode(options) or None
    if libc.mount(what, where, kind.encode() or None, ctypes.c_ulong(flags), given):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _unmount(target: str) -> None:
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(target), _DETACH)
