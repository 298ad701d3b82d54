"""Starts a process for every run of a script that trains with Keras or Paddle.

``python -m ampscope.frameworks.server --store FILE --python EXECUTABLE`` speaks the zygote's
protocol (``ampscope.run.zygote``): lines ``RUN_ID<TAB>OUT<TAB>ERR<TAB>LIMIT_S`` on standard input,
``RUN_ID<TAB>STATUS`` on standard output when a run has ended. It starts processes where the zygote
forks: TensorFlow and Paddle start threads at their import, and a fork of such a process hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ampscope.frameworks.pythons import with_package

POLL_S = 0.02
MAX_OUTPUT_BYTES = 256 * 2**20  # as the zygote's
HUNG, FLOODED, NO_FORK = "hung", "flooded", "nofork"


@dataclass(slots=True)
class _Child:
    """A run under way."""

    process: subprocess.Popen[bytes]
    outputs: tuple[Path, ...]
    deadline: float
    killed_for: str = ""


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--python", required=True)
    found = parser.parse_args()
    children: dict[str, _Child] = {}
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
                _start(line.decode(), found.python, found.store, children)
        elif not open_input:
            time.sleep(POLL_S)
            for child in children.values():
                _kill(child)
        _look_after(children)


def _start(line: str, python: str, store: str, children: dict[str, _Child]) -> None:
    run_id, out, err, limit = line.split("\t")
    command = [python, "-m", "ampscope.frameworks.script", "--store", store, "--run", run_id]
    try:
        with open(out, "ab") as output, open(err, "ab") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                env=with_package(dict(os.environ)),
            )
    except OSError:
        _answer(run_id, NO_FORK)
        return
    children[run_id] = _Child(process, (Path(out), Path(err)), time.monotonic() + float(limit))


def _look_after(children: dict[str, _Child]) -> None:
    """End what must end, and answer for what has ended."""
    for run_id, child in list(children.items()):
        if not child.killed_for:
            if time.monotonic() > child.deadline:
                child.killed_for = HUNG
            elif sum(_size(path) for path in set(child.outputs)) > MAX_OUTPUT_BYTES:
                child.killed_for = FLOODED
            if child.killed_for:
                _kill(child)
        status = child.process.poll()
        if status is not None:
            _kill(child)  # what the script started and left behind is in its group
            del children[run_id]
            _answer(run_id, child.killed_for or status)


def _kill(child: _Child) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _answer(run_id: str, status: int | str) -> None:
    os.write(1, f"{run_id}\t{status}\n".encode())


if __name__ == "__main__":
    main()
