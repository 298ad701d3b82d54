"""Scripts that an agent may run, and the child processes that run them.

A child is a command of ampscope with its arguments as a list, never a shell. It is told to stop
when the request for it is cancelled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream
from mcp.server.mcpserver import Context

from ampscope.errors import BadInput
from ampscope.launcher.children import child_environment
from ampscope.launcher.script_runs import ENDS_WITHIN_S
from ampscope.story.document import line

MOST_ARGUMENTS, LONGEST_ARGUMENT = 100, 4_000
PULSE_S = 5.0  # between notifications of progress while nothing new happens
# A child that is told to stop ends when a torch import of its own child has, and puts files back.
ENDING_S = ENDS_WITHIN_S + 60
MOST_OUTPUT = 16_000_000  # bytes of a child's standard output; a document has about 50,000
_RUNNING = "Running: "  # how `ampscope diagnose` names the run that it starts


class Folders:
    """The folders that scripts may lie in. Symbolic links are followed first: what they lead to
    must lie there, too."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises BadInput for what is no folder."""
        for folder in folders:
            if not folder.is_dir():
                raise BadInput(f"There is no folder {folder} for scripts.")
        self.folders = tuple(dict.fromkeys(folder.resolve() for folder in folders))

    def __str__(self) -> str:
        return ", ".join(map(str, self.folders))

    def holds(self, path: Path) -> bool:
        """Whether it leads to a place below one of them."""
        try:
            real = path.resolve()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a name that cannot be one
            return False
        return any(real.is_relative_to(folder) for folder in self.folders)

    def find(self, name: str) -> Path:
        """The real path of a file or folder by its absolute path or its path from one of the
        folders. Raises BadInput for one that lies elsewhere, or is not there."""
        if not self.folders:
            raise BadInput(
                "This server was started without a folder of scripts, so it reads and runs none. "
                "Start it with: ampscope mcp --scripts FOLDER"
            )
        shown = line(name, 500)
        if not name or "\0" in name:
            raise BadInput(f"{name!r} is no name of a script.")
        inside = [path for folder in self.folders if self.holds(path := folder / name)]
        if not inside:
            raise BadInput(
                f"{shown} does not lie below the folders that this server may use: {self}."
            )
        found = next((path for path in inside if os.path.exists(path)), None)  # never raises
        if found is None:
            raise BadInput(f"There is no file {shown} below {self}.")
        return found.resolve()

    def script(self, name: str) -> Path:
        """A file among them. Raises BadInput for a folder."""
        found = self.find(name)
        if not found.is_file():
            raise BadInput(f"{line(name, 500)} is not a file. Name a script in it.")
        return found


def checked_arguments(args: Sequence[str]) -> list[str]:
    """A script's own arguments. Raises BadInput for too many, too long ones, and what no command
    line can hold."""
    if len(args) > MOST_ARGUMENTS:
        raise BadInput(f"A script takes {MOST_ARGUMENTS} arguments here, not {len(args):,}.")
    for arg in args:
        if len(arg) > LONGEST_ARGUMENT or "\0" in arg:
            raise BadInput(f"The argument {line(arg, 60)!r} is too long or holds a null byte.")
    return list(args)


async def run_child(
    command: Sequence[str], folder: Path, hear: Callable[[str], None]
) -> tuple[int, str, str]:
    """Exit status, standard output and the last line of standard error, of which ``hear`` gets
    each line. When this is cancelled the child is told to stop, and waited for."""
    process = await anyio.open_process(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=child_environment(), start_new_session=True,
    )  # fmt: skip
    _running.add(process.pid)
    said: list[str] = []
    last = [""]

    async def read() -> None:
        assert process.stdout is not None
        size = 0
        async for text in TextReceiveStream(process.stdout, errors="replace"):
            size += len(text)
            if size <= MOST_OUTPUT:
                said.append(text)

    async def listen() -> None:
        assert process.stderr is not None
        rest = ""
        async for text in TextReceiveStream(process.stderr, errors="replace"):
            *lines, rest = (rest + text).split("\n")
            for one in lines:
                last[0] = one.strip() or last[0]
                hear(one)
            rest = rest[-LONGEST_ARGUMENT:]
        last[0] = rest.strip() or last[0]

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(listen)
            status = await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
        _running.discard(process.pid)
    return status, "".join(said), last[0]


async def _end(process: Process) -> None:
    """Ask it to stop; kill what does not. What it started ends with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            break
        _tell(process.pid, number)
        with anyio.move_on_after(ENDING_S):
            await process.wait()
    await process.aclose()


def stop_all() -> None:
    """Ask every child to stop, for a server that ends at once: each cleans up by itself."""
    for pid in _running:
        _tell(pid, signal.SIGTERM)


def _tell(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


_running: set[int] = set()


class Progress:
    """Tells the client what runs now: seconds so far, and the newest sentence, at least every
    :data:`PULSE_S`, so that it does not give up on a long diagnosis."""

    def __init__(self, context: Context[Any, Any]) -> None:
        self._context = context
        self._begun = anyio.current_time()
        self._words = "starting"
        self._news = anyio.Event()

    def say(self, words: str) -> None:
        """The newest sentence."""
        self._words = line(words)
        self._news.set()

    def hear(self, text: str) -> None:
        """A line that `ampscope diagnose` wrote for people."""
        if text.startswith(_RUNNING):
            self.say(text)

    @asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        """Around the work."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._pulse)
            yield
            group.cancel_scope.cancel()

    async def _pulse(self) -> None:
        elapsed_s = 0.0
        while True:
            self._news = anyio.Event()
            now_s = anyio.current_time() - self._begun
            elapsed_s = round(max(now_s, elapsed_s + 0.01), 2)  # the protocol wants it to increase
            await self._context.report_progress(elapsed_s, None, self._words)
            with anyio.move_on_after(PULSE_S):
                await self._news.wait()
