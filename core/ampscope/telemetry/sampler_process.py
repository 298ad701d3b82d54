"""Start the sampler beside a run, and end it: what a run's own process does.

    with beside(store, run_id) as readings:
        readings.add("cuda:0", uuid)         # the GPU, once it is known
        …                                    # the run
    readings.note                            # "" or one sentence on what could not be read

``AMPSCOPE_TELEMETRY=0`` in the environment leaves it out.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

WANTED = "AMPSCOPE_TELEMETRY"
END_WITHIN_S = 3.0  # it needs 0.01 s, and 0.2 s where it has only just been started
MAX_NOTE = 500
# A child of this shell is adopted by init: the shell ends at once, and is waited for here. A
# background command's input would be /dev/null (POSIX, asynchronous lists), hence number 3.
_NOBODYS = ("/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- & exit 0', "sh")


def is_wanted() -> bool:
    """Whether runs are to be sampled at all."""
    return os.environ.get(WANTED, "1") != "0"


class Readings:
    """A sampler under way, or none. :meth:`stop` again does nothing."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self.note = ""
        self._process = process
        self._owner = os.getpid()

    def add(self, device: str, uuid: str) -> None:
        """Read this GPU too, from here on."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._process.stdin.fileno(), f"{device} {uuid}\n".encode())

    def stop(self) -> str:
        """Let it write what it has, and end. Returns the note."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            return self.note
        if os.getpid() != self._owner:  # a fork of the run's process holds the same pipes
            return self.note
        with contextlib.suppress(OSError):  # it has ended by itself
            # Forks may hold the pipe open: its end is late.
            os.write(process.stdin.fileno(), b".\n")
        with contextlib.suppress(OSError):
            process.stdin.close()
        said = _until_closed(process.stdout.fileno())
        self.note = f"{self.note} {said}".strip()
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_WITHIN_S)
        return self.note

    def __enter__(self) -> Readings:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def beside(store: Path, run_id: str, *, as_child: bool = True) -> Readings:
    """Start reading the CPU for the run of this process; returns at once, and never raises.

    Without ``as_child`` the sampler is no child of this process, whose code may be a user's:
    a script that waits for any child of its own would wait for it.
    """
    if not is_wanted():
        return Readings()
    command = [sys.executable, "-m", "ampscope.telemetry.sampler", "--store", str(store.absolute())]
    command += ["--run", run_id, "--pid", str(os.getpid())]
    try:
        process = subprocess.Popen(
            command if as_child else [*_NOBODYS, *command],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and the end of a script's group do not reach it
            cwd=Path(__file__).resolve().parents[2],  # a script's folder may hold a select.py
        )
        if not as_child:
            process.wait()
    except OSError as error:
        readings = Readings()
        readings.note = f"The machine could not be read beside the run: {error.strerror}."
        return readings
    return Readings(process)


def _until_closed(descriptor: int) -> str:
    """What it says until it closes its output, or the time is over."""
    said = b""
    deadline = time.monotonic() + END_WITHIN_S
    while len(said) < MAX_NOTE and (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([descriptor], [], [], left)
        part = os.read(descriptor, MAX_NOTE) if ready else b""
        if not part:
            break
        said += part
    return said.decode(errors="replace").strip()
