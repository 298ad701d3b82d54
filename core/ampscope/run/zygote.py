"""A process that has imported torch once and forks a child for every run of a script.

``python -m ampscope.run.zygote --store FILE --script SCRIPT`` reads lines
``RUN_ID<TAB>OUT<TAB>ERR<TAB>LIMIT_S`` from standard input, forks, and answers ``RUN_ID<TAB>STATUS``
on standard output when the child has ended: its exit status (negative for a signal), or one of the
words ``hung``, ``flooded`` and ``nofork``. Importing torch takes 1.5 to 3 s; a diagnosis makes 3 to
12 runs. Nothing that starts threads runs before a fork, and torch starts its own at the first
parallel op.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

POLL_S = 0.02
MAX_OUTPUT_BYTES = 256 * 2**20  # no training prints so much; a loop that prints fills a disk
HUNG, FLOODED, NO_FORK = "hung", "flooded", "nofork"
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass(slots=True)
class _Child:
    """A run under way."""

    run_id: str
    outputs: tuple[Path, ...]
    deadline: float
    killed_for: str = ""


@click.command()
@click.option("--store", type=click.Path(path_type=Path), required=True)
@click.option("--script", required=True)
def main(store: Path, script: str) -> None:
    """Serve runs of SCRIPT, into STORE, until standard input ends."""
    import torch  # the import that every child shares

    import ampscope.run.script_child  # noqa: F401  # the children's other imports
    from ampscope.run.probe import preload
    from ampscope.run.script_text import read_once

    _adopt_orphans()
    torch.manual_seed(0)
    preload(torch.device("cpu"))
    read_once(script)
    children: dict[int, _Child] = {}
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    pending = b""
    open_input = True
    _answer("ready", 0)
    while open_input or children:
        if open_input and selector.select(POLL_S):
            chunk = os.read(0, 65536)
            open_input = bool(chunk)
            pending += chunk
            *lines, pending = pending.split(b"\n")
            for line in lines:
                _start(line.decode(), store, children)
        elif not open_input:
            time.sleep(POLL_S)
            for pid in children:
                _kill(pid)
        _end_what_must(children)
        _reap(children)


def _start(line: str, store: Path, children: dict[int, _Child]) -> None:
    run_id, out, err, limit = line.split("\t")
    try:
        pid = os.fork()
    except OSError:
        _answer(run_id, NO_FORK)
        return
    if pid:
        outputs = tuple({Path(out), Path(err)})
        children[pid] = _Child(run_id, outputs, time.monotonic() + float(limit))
        return
    status = 1
    try:
        from ampscope.capture.exponent_count import adopt_fork
        from ampscope.run.script_child import run_child, settle
        from ampscope.store.reader import Reader

        adopt_fork()
        settle(Path(out), Path(err))
        with Reader(store) as reader:
            spec = reader.run(run_id).spec
        status = run_child(store, run_id, spec)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _adopt_orphans() -> None:
    """What a run starts and leaves behind, such as the process that reads the machine beside it, is
    waited for here: the first process of a container often waits for nobody (prctl(2), Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_what_must(children: dict[int, _Child]) -> None:
    """A child's own watchdog cannot end it while native code keeps Python's lock."""
    for pid, child in children.items():
        if child.killed_for:
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
        child = children.pop(pid, None)
        if child is not None:
            _kill(pid)  # what the script started and left behind is in its group
            _answer(child.run_id, child.killed_for or os.waitstatus_to_exitcode(status))


def _kill(pid: int) -> None:
    """End a child and everything in its group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _answer(run_id: str, status: int | str) -> None:
    os.write(1, f"{run_id}\t{status}\n".encode())


if __name__ == "__main__":
    main()
