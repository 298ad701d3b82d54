"""A private view of the files that a script writes. Imports no framework.

The runs of a diagnosis start from the same files, see nothing of one another's, and leave the
user's as they were. :func:`private_files` gives the process that calls it such a view.
docs/decisions/0015 says why it is done in these three ways, of which the first that works is taken:

*overlay* (:mod:`ampscope.runner.overlay`):
    a file system of the process's own. Every path stays what it is.
*copy* (:mod:`ampscope.runner.private_copy`):
    the script runs in a copy of its *roots*: the project that holds its working folder and its own
    folder, and what its arguments point at. Elsewhere no contents and no names can be changed;
    permissions, owners, times and attributes can.
*compared*:
    as copy, where the system cannot keep anything unwritten: the user's files are compared after
    the run and put back, so such runs are made one at a time.

:class:`Shared` hears of a connection to another machine: such runs are made one at a time, too, and
their report names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ampscope.errors import AmpscopeError
from ampscope.files import is_below
from ampscope.patches import Patches
from ampscope.records import RunSpec, State
from ampscope.runner import overlay, private_copy
from ampscope.runner.put_back import is_installed
from ampscope.runner.script_text import also_at
from ampscope.store.writer import RunWriter

OVERLAY, COPY, COMPARED = KINDS = ("overlay", "copy", "compared")
FORCED = "AMPSCOPE_PRIVATE_FILES"  # one of the three, and no other
LOCK = "shared.lock"  # beside the views of one diagnosis
NO_OVERLAY = "no-overlay"  # beside the views, where an overlay keeps apart what a script moves
WAITS = "Stopped before it shares what another run is at work on: it is run again alone."
MOST_NAMED = 20  # folders, in texts and variables
_MARKERS = (".git", "pyproject.toml", "setup.py", "setup.cfg", ".hg")
_SYSTEM = ("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys",
           "/usr", "/var", "/opt", "/home", "/mnt", "/media", "/Users", "/private")  # fmt: skip
_TEMPORARY = ("/tmp", "/var/tmp", "/private/tmp")
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR",
           "PYTHONPYCACHEPREFIX", "NUMBA_CACHE_DIR", "CUDA_CACHE_PATH",
           "TORCHINDUCTOR_CACHE_DIR")  # fmt: skip
_PARTS = {"HF_HOME": ("hub",), "TORCH_HOME": ("hub",), "XDG_CACHE_HOME": ("huggingface", "torch")}
_TEXTS = (".py", ".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".env", ".sh", ".txt")
_SMALL, _MANY, _SEEN = 64 << 10, 300, 20_000  # bytes of such a text; texts, files in a project
_HOME_CACHES = (".nv", ".triton", ".config/matplotlib", ".cache/huggingface", ".cache/torch")


class NotPossible(Exception):  # noqa: N818  # the machine does not allow it; not a bug
    """No way of having private files works here."""


@dataclass(frozen=True, slots=True)
class View:
    """A private view that is in force in this process."""

    kind: str  # overlay, copy or compared
    roots: tuple[str, ...]
    store: Path  # how ampscope's own store is reached from now on
    workload: str  # the script's file, or ``-m module``
    args: tuple[str, ...]  # of the script
    folder: Path  # where what is written goes

    def notes(self) -> list[str]:
        """What the report says of the run's files."""
        if self.kind == OVERLAY:
            return []
        said = f"The script ran in a copy of {', '.join(self.roots)}, at other paths"
        if self.folder.with_name(NO_OVERLAY).exists():
            said += ", because it moves what an overlay of its files keeps apart"
        if self.kind == COPY:
            return [
                f"{said}. Elsewhere it could change no contents and no names: that ends in a "
                "PermissionError. `ampscope diagnose --in-place` runs it on the files themselves. "
                "Permissions, owners, times and attributes of files elsewhere are not kept from it."
            ]
        return [f"{said}."]


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
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    lock = os.open(folder.with_name(LOCK), flags, 0o600)
    opened: list[tuple[RunWriter, Shared]] = []

    def taken(path: Path) -> tuple[RunWriter, Shared]:
        if not opened:
            writer = RunWriter(path, run_id)
            writer.adopt()
            shared = Shared(lock, run_id, partial(wait_for_the_other, writer))
            opened.append((writer, shared))
        return opened[-1]

    def prepare(kind: str) -> None:
        _, shared = taken(store)
        if kind == COMPARED:  # each finds the user's files as the one before has left them
            shared.be_alone()

    try:
        view = private_files(spec.workload, spec.args, store, folder, prepare)
    except NotPossible as error:
        instead = ": `ampscope diagnose --in-place` runs the script on yours"
        if isinstance(error.__cause__, private_copy.BusyError):
            instead = ""  # the other would put back what was written meanwhile
        taken(store)[0].finish(
            State.FAILED, f"The run could not have files of its own ({error}){instead}."
        )
        return None
    also_at(spec.workload, view.workload)
    writer, shared = taken(view.store)
    shared.listen()

    def notes() -> tuple[str, ...]:
        return tuple(filter(None, (shared.note(), *view.notes())))

    return Adopted(writer, view.store, replace(spec, workload=view.workload, args=view.args), notes)


def wait_for_the_other(writer: RunWriter) -> None:
    """Another run is at work on what both would share: this one is made again later."""
    with contextlib.suppress(AmpscopeError):
        writer.finish(State.FAILED, WAITS)
    os.kill(os.getpid(), signal.SIGKILL)


class Shared:
    """Hears of what a run shares with others. ``names`` are for the report; ``lock`` is a file that
    is open, and that the first of several runs to share something locks until it ends; it writes
    its ``run_id`` there."""

    def __init__(self, lock: int, run_id: str, on_second: Callable[[], None]) -> None:
        self.names: list[str] = []
        self._run_id = run_id
        self._lock = lock
        self._on_second = on_second  # another run has been the first, and still runs
        self._is_held = False
        self._pid = os.getpid()
        self._patches = Patches()

    def listen(self) -> None:
        """From now on, for good. A hook on what Python audits would be called for each frame whose
        code an instrument looks at, millions of times in a run."""
        for name in ("connect", "connect_ex"):
            self._patches.wrap(socket.socket, name, self._heard)

    def note(self) -> str:
        """One sentence for the report; "" when nothing was shared."""
        if not self.names:
            return ""
        more = f" and {len(self.names) - 4} more" if len(self.names) > 4 else ""
        return (
            f"The script talks to what lies behind {', '.join(self.names[:4])}{more}, of which its "
            "runs cannot have copies of their own: they were made one at a time, and each finds "
            "what the one before left there."
        )

    def be_alone(self) -> None:
        """Hold the lock until this process ends, or be the second."""
        if self._is_held:
            return
        self._is_held = True
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._on_second()
        else:
            os.write(self._lock, f"{self._run_id}\n".encode())

    def _heard(self, connect: Callable[..., Any], *given: Any) -> Any:
        if len(given) > 1 and os.getpid() == self._pid:
            self._connects(given[1])
        return connect(*given)

    def _connects(self, address: object) -> None:
        if not isinstance(address, tuple) or not address:
            return
        host = str(address[0])
        if host.startswith("127.") or host in ("localhost", "::1", "0.0.0.0", ""):
            return
        if host not in self.names:
            self.names.append(host)
            self.be_alone()


def private_files(
    workload: str, args: Sequence[str], store: Path, folder: Path, prepare: Callable[[str], None]
) -> View:
    """Give this process, which must have a single thread, a private view; ``folder`` is its own and
    empty, and thrown away by the caller after :func:`ampscope.runner.put_back.put_back`. Before
    a copy is made, ``prepare`` is called with its kind: files of the store cannot be made
    afterwards, and in a run that is compared no other process may write. Raises NotPossible."""
    store = Path(os.path.realpath(store))  # SQLite's files lie beside what a link leads to
    roots = roots_of(workload, os.getcwd(), args)
    reasons = []
    for kind in KINDS:
        if os.environ.get(FORCED, kind) not in (kind, ""):
            continue
        if kind == OVERLAY and folder.with_name(NO_OVERLAY).exists():
            continue
        try:
            if kind == OVERLAY:
                return _overlaid(roots, workload, args, store, folder)
            prepare(kind)
            return _copied(kind, roots, workload, args, store, folder)
        except private_copy.BusyError as error:
            raise NotPossible(str(error)) from error
        except (OSError, AttributeError) as error:  # a function that this system's C library lacks
            reasons.append(f"{kind}: {error}")
    raise NotPossible("; ".join(reasons) or f"{FORCED} names no kind of {', '.join(KINDS)}")


def _overlaid(
    roots: list[str], workload: str, args: Sequence[str], store: Path, folder: Path
) -> View:
    if sys.platform != "linux":
        raise OSError("not on this system")
    stands = _stands_in(workload, os.getcwd())
    if "/" in stands:
        raise OSError("no overlay goes over /")
    found = overlay.overlaid(roots, _caches((*roots, *stands)), store, folder)
    return View(OVERLAY, tuple(roots), found, workload, tuple(args), folder)


def _copied(
    kind: str, roots: list[str], workload: str, args: Sequence[str], store: Path, folder: Path
) -> View:
    cwd = os.getcwd()
    folder.mkdir(parents=True, exist_ok=True)
    stands = _stands_in(workload, cwd)
    plain = [here for here in stands if not is_below(here, roots)]
    caches = _caches((*roots, *stands))
    named = _named(_of_projects(roots), roots, stands, caches)
    led = _named(_of_environment(), [*roots, *named], stands, caches)
    writable = ["/dev", "/proc", *caches]
    first = sorted({p for p in map(_project, stands) if is_below(p, roots)}, key=len)
    first = [p for p in first if not any(p != other and is_below(p, (other,)) for other in first)]
    copy = private_copy.copied(
        roots, named, led, plain, folder, store, writable, only=kind == COPY, first=first
    )
    os.chdir(copy.led(cwd))
    os.environ["PWD"] = os.getcwd()
    tempfile.tempdir = None  # as TMPDIR says now
    if not os.path.isdir(os.path.expanduser("~/.triton")):  # it could not be made
        os.environ.setdefault("TRITON_CACHE_DIR", f"{tempfile.gettempdir()}/triton")
    if not workload.startswith("-m "):
        workload = copy.led(os.path.abspath(workload))
    own_args = tuple(copy.led_text(arg) for arg in args)
    return View(kind, tuple(roots), store, workload, own_args, folder)


def roots_of(workload: str, cwd: str, args: Sequence[str] = ()) -> list[str]:
    """Folders that a script is likely to write below, none inside another.

    The projects around the working folder and the script's own folder, and the folders that
    arguments name. System folders and temporary ones are none.
    """
    wanted = [_project(folder) for folder in _stands_in(workload, cwd)]
    for arg in args:
        for path in _paths_in(arg):
            full = os.path.realpath(os.path.join(cwd, os.path.expanduser(path)))
            wanted.append(_existing_folder(full))
    kept: list[str] = []
    for path in sorted({os.path.realpath(w) for w in wanted}, key=len):
        if path not in _SYSTEM + _TEMPORARY and os.path.isdir(path) and not is_below(path, kept):
            kept.append(path)
    return kept


def _paths_in(arg: str) -> list[str]:
    """Texts in an argument that may be paths: ``--out=/a``, ``-o/a``, ``file:///a``, ``{"o":
    "/a"}``, and the whole of it."""
    parts = [arg, arg.rpartition("=")[2], *re.split(r"[\s=,;:\"'{}\[\]()]+", arg)]
    parts += [part[2:] for part in parts if re.match(r"-\w[/~.]", part)]
    return [p for p in parts if ("/" in p or p in ("..", "~")) and "\0" not in p and p[0] != "-"]


def _of_environment() -> list[str]:
    """Values of variables that may name a place of output."""
    apart_from = (*private_copy.NEVER_LED, *private_copy.NOT_NAMED)
    return [value for name, value in os.environ.items() if name not in apart_from]


def _of_projects(roots: list[str]) -> list[str]:
    """Small texts of the projects: configurations, scripts."""
    texts = []
    for root in roots:
        found: list[str] = []
        seen = 0
        for folder, folders, files in os.walk(root):
            seen += len(files)
            folders[:] = [name for name in folders if not is_installed(f"{folder}/{name}")]
            for path in (f"{folder}/{name}" for name in files if name.endswith(_TEXTS)):
                with contextlib.suppress(OSError):
                    if os.stat(path).st_size <= _SMALL:
                        found.append(path)
            if len(found) >= _MANY or seen > _SEEN:
                break
        for path in found[:_MANY]:
            with contextlib.suppress(OSError):
                texts.append(Path(path).read_text(errors="replace"))
    return texts


def _named(texts: list[str], roots: list[str], stands: list[str], caches: list[str]) -> list[str]:
    """Folders of this user's that the texts name: Landlock does not keep their times and
    permissions. None that holds a root, or a folder where the script ``stands``: less of a named
    one is copied."""
    apart = (*_SYSTEM, *_TEMPORARY, os.path.expanduser("~"))
    system = (*overlay.INSTALLED, *overlay.KERNEL, "/run", sys.prefix, sys.base_prefix)
    shared = [os.path.realpath(path) for path in (*caches, *system)]
    found: list[str] = []
    paths = {path for text in texts for path in private_copy.PATH.findall(text) if path[1:]}
    for path in sorted(paths, key=len):
        with contextlib.suppress(OSError, ValueError):
            real = _existing_folder(os.path.realpath(os.path.expanduser(path)))
            is_own = os.stat(real).st_uid == os.geteuid() and os.access(real, os.W_OK)
            holds = any(is_below(other, (real,)) for other in (*roots, *stands, *shared))
            is_new = real not in apart and not is_below(real, (*roots, *found, *shared))
            if is_own and is_new and not holds:
                found.append(real)
        if len(found) >= MOST_NAMED:
            break
    return found


def _stands_in(workload: str, cwd: str) -> list[str]:
    """The working folder and the script's own."""
    own = [] if workload.startswith("-m ") else [os.path.dirname(os.path.realpath(workload))]
    return [os.path.realpath(cwd), *own]


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


def _caches(apart: Iterable[str]) -> list[str]:
    """Where downloads and compiled kernels are kept for every run to find. Those that libraries
    would make are made: in a view they would be a run's own, or could not be. One that is the
    temporary folder, or holds the user's home or a folder of ``apart``, is no cache alone: of such
    a one, what the libraries keep in it."""
    made = [os.path.expanduser("~/.cache")]
    made += [os.environ[name] for name in _CACHES if os.environ.get(name)]
    with contextlib.suppress(OSError, KeyError):  # torch's own default
        name = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        made.append(f"{tempfile.gettempdir()}/torchinductor_{name}")
    for folder in made:
        with contextlib.suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
    found = [os.path.expanduser(f"~/{name}") for name in _HOME_CACHES]
    for name, parts in _PARTS.items():
        found += [f"{os.environ[name]}/{part}" for part in parts if os.environ.get(name)]
    found.append(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    temporary = {os.path.realpath(path) for path in (tempfile.gettempdir(), *_TEMPORARY)}
    held = [os.path.realpath(path) for path in (os.path.expanduser("~"), *apart)]
    kept = []
    for folder in (*made, *found):
        real = os.path.realpath(folder)
        if real not in temporary and not any(is_below(inner, (real,)) for inner in held):
            kept.append(folder)
    return kept
