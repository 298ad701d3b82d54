"""Runs of one script under controls: start the zygote, run a control, read back what was seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from ampscope.errors import AmpscopeError
from ampscope.experiments.launch import child_environment
from ampscope.observations import Observation
from ampscope.records import RunInfo, RunSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One finished run with everything that was recorded."""

    info: RunInfo
    observations: tuple[Observation, ...]
    output: str  # the end of what the script printed


MAX_OUTPUT = 20_000


class ScriptRuns:
    """Serves runs of one script; use as a context manager."""

    def __init__(self, spec: RunSpec, store: Path) -> None:
        self.spec = spec
        self.store = store
        self.folder = tempfile.TemporaryDirectory(prefix="ampscope-")
        self._process: subprocess.Popen[bytes] | None = None
        self._done: dict[str, int] = {}
        self._gone = False  # the zygote has ended
        self._changed = threading.Condition()

    def __enter__(self) -> ScriptRuns:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ampscope.run.zygote", "--store", str(self.store.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            env=child_environment(),
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        process = self._process
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()  # the zygote kills what still runs, and ends
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.folder.cleanup()

    def start(self, control: str, parent: str = "") -> str:
        """Start a run under ``control``; returns its id at once."""
        writer = RunWriter.create(self.store, replace(self.spec, control=control, parent=parent))
        writer.close()
        process = self._process
        if process is None or process.stdin is None:
            raise AmpscopeError("ScriptRuns is a context manager: enter it first.")
        process.stdin.write(f"{writer.run_id}\t{self._output_file(writer.run_id)}\n".encode())
        process.stdin.flush()
        return writer.run_id

    def wait(self, run_id: str, show: Callable[[str], None] | None = None) -> ScriptRun:
        """Wait for a run; ``show`` gets the script's output as it comes."""
        shown = 0
        while True:
            with self._changed:
                ended = run_id in self._done or self._gone
                if not ended:
                    self._changed.wait(0.1)
            if show is not None:
                shown += self._show_new(run_id, shown, show)
            if ended:
                break
        self._close_if_open(run_id)
        with Reader(self.store) as reader:
            info = reader.run(run_id)
            observations = tuple(reader.observations(run_id))
        return ScriptRun(info, observations, self._tail(run_id))

    def run(self, control: str, parent: str = "") -> ScriptRun:
        """Start and wait."""
        return self.wait(self.start(control, parent))

    def _close_if_open(self, run_id: str) -> None:
        """A child that died without a word leaves its run open: say so in its place."""
        with Reader(self.store) as reader:
            state = reader.run(run_id).state
        if state.is_active or state is State.LOST:
            status = self._done.get(run_id, 0)
            writer = RunWriter(self.store, run_id)
            writer.finish(State.FAILED, _last_words(status, self._tail(run_id)))
            writer.close()

    def _listen(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        for line in process.stdout:
            run_id, _, status = line.decode().strip().partition("\t")
            with self._changed:
                self._done[run_id] = int(status or 0)
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _output_file(self, run_id: str) -> Path:
        return Path(self.folder.name) / f"{run_id}.out"

    def _show_new(self, run_id: str, shown: int, show: Callable[[str], None]) -> int:
        path = self._output_file(run_id)
        if not path.exists():
            return 0
        with path.open("rb") as handle:
            handle.seek(shown)
            fresh = handle.read(1 << 20)
        if fresh:
            show(fresh.decode(errors="replace"))
        return len(fresh)

    def _tail(self, run_id: str) -> str:
        path = self._output_file(run_id)
        if not path.exists():
            return ""
        with path.open("rb") as handle:
            handle.seek(max(0, os.path.getsize(path) - MAX_OUTPUT))
            return handle.read().decode(errors="replace")


def _last_words(status: int, output: str) -> str:
    """One sentence about a child that could not write how it ended."""
    lines = [line for line in output.strip().splitlines() if line.strip()]
    said = f" Its last line: {lines[-1][:200]}" if lines else ""
    if status == -signal.SIGKILL:
        return f"The script was killed (SIGKILL): most likely the machine ran out of memory.{said}"
    if status < 0:
        return f"The script was ended by {signal.Signals(-status).name}.{said}"
    return f"The script's process ended without a word (status {status}).{said}"
