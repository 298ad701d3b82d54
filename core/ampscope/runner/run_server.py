"""Serves runs of a script from lines: each in a process of its own, which is ended at its limits.

Lines ``RUN_ID<TAB>OUT<TAB>ERR<TAB>LIMIT_S<TAB>VIEW`` come on standard input, VIEW being the folder
of a private view of the files (ampscope.runner.private_files) or empty; a line ``RUN_ID`` ends that
run. ``RUN_ID<TAB>STATUS`` goes to standard output when a run and all that it started have ended, so
that no GPU's memory is theirs any more: its exit status (negative for a signal), or one of the
words ``hung``, ``flooded`` and ``nofork``. How a process is started is the caller's:
ampscope.runner.fork_server forks, ampscope.ext.frameworks.server starts another Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ampscope.runner.put_back import CLAIMED

POLL_S = 0.02
GONE_WITHIN_S = 5.0  # what a run has left behind, once it is killed; a driver frees memory slowly
MAX_OUTPUT_BYTES = 256 * 2**20  # no training prints so much; a loop that prints fills a disk
HUNG, FLOODED, NO_FORK = "hung", "flooded", "nofork"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
PARENT = "AMPSCOPE_PARENT"  # the process that starts this one, where this one is to end with it

Start = Callable[[str, Path, Path, str], int]


@dataclass(slots=True)
class _Child:
    """A run under way."""

    run_id: str
    outputs: tuple[Path, ...]
    deadline: float
    view: str
    killed_for: str = ""
    status: int | None = None  # of its own process, which has ended


def serve(start: Start) -> None:
    """Until standard input ends; then what still runs is ended.

    ``start(run_id, out, err, view)`` starts a process that leads a group of its own, and returns
    its number; it raises OSError where the system refuses one.
    """
    children: dict[int, _Child] = {}
    was_left = False  # with runs under way
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    pending, open_input = b"", True
    while open_input or children:
        if open_input and selector.select(POLL_S):
            chunk = os.read(0, 65536)
            open_input = bool(chunk)
            pending += chunk
            *lines, pending = pending.split(b"\n")
            for line in lines:
                _obey(line.decode(), start, children)
        elif not open_input:
            was_left = True
            time.sleep(POLL_S)
            for pid, child in children.items():
                if child.status is None:
                    _kill(pid)
        _end_what_must(children)
        _reap(children)
        _answer_what_ended(children)
    if was_left:
        _end_adopted()


def end_with_parent() -> None:
    """Have the system end this process with the one that started it, if that has asked for it
    (:data:`PARENT`), also where that is killed. On Linux; at once where it is gone already."""
    parent = int(os.environ.pop(PARENT, "") or 0)
    if not parent:
        return
    die_with_parent(wanted=True)
    if os.getppid() != parent:
        try:
            os.kill(parent, 0)  # behind a program that starts Python for us
        except ProcessLookupError:
            os._exit(1)


def die_with_parent(*, wanted: bool) -> None:
    """SIGKILL for this process when the thread that started it ends (prctl(2)); or not any more."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL if wanted else 0, 0, 0, 0)


def adopt_orphans() -> None:
    """What a run starts and leaves behind, such as the process that reads the machine beside it, is
    waited for here: the first process of a container often waits for no child (prctl(2), Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def answer(run_id: str, status: int | str) -> None:
    """One line to the parent, which may be gone; then there are still children to end."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{run_id}\t{status}\n".encode())


def _obey(line: str, start: Start, children: dict[int, _Child]) -> None:
    if "\t" not in line:
        for pid in (pid for pid, child in children.items() if child.run_id == line):
            _kill(pid)
        return
    run_id, out, err, limit, view = line.split("\t")
    try:
        pid = start(run_id, Path(out), Path(err), view)
    except OSError:
        answer(run_id, NO_FORK)
        return
    outputs = tuple({Path(out), Path(err)})
    children[pid] = _Child(run_id, outputs, time.monotonic() + float(limit), view)


def _end_what_must(children: dict[int, _Child]) -> None:
    """A child's own watchdog cannot end it while native code keeps Python's lock."""
    for pid, child in children.items():
        if child.killed_for or child.status is not None:
            continue
        if time.monotonic() > child.deadline:
            child.killed_for = HUNG
        elif sum(_size(path) for path in child.outputs) > MAX_OUTPUT_BYTES:
            child.killed_for = FLOODED
        if child.killed_for:
            _kill(pid)


def _reap(children: dict[int, _Child]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # neither runs nor orphans
            return
        if not pid:
            return
        child = children.get(pid)
        if child is not None:
            _kill(pid)  # what the script started and left behind is in its group
            child.status = os.waitstatus_to_exitcode(status)
            child.deadline = time.monotonic() + GONE_WITHIN_S


def _answer_what_ended(children: dict[int, _Child]) -> None:
    for pid, child in list(children.items()):
        if child.status is None:
            continue
        left: list[int] = []
        if child.view and os.path.exists(f"{child.view}/{CLAIMED}"):  # alone; its files are next
            left = [one for one in _own_children() if one not in children]
            _end_each(left)
        if not (left or _is_group(pid)) or time.monotonic() > child.deadline:
            del children[pid]
            answer(child.run_id, child.killed_for or child.status)


def _end_adopted() -> None:
    """End what killed runs have left in groups of their own, such as ranks: it comes to this
    process, and so do the children of each when that has ended."""
    until = time.monotonic() + GONE_WITHIN_S
    while (left := _own_children()) and time.monotonic() < until:
        _end_each(left)
        _reap({})
        time.sleep(POLL_S)


def _end_each(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _own_children() -> list[int]:
    """Empty where the system does not tell (proc(5), Linux)."""
    found: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += path.read_text().split()
    return [int(pid) for pid in found]


def _is_group(pid: int) -> bool:
    """Whether a process of the child's group is left."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


def _kill(pid: int) -> None:
    """End a child and everything in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
