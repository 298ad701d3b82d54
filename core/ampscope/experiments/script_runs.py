"""Runs of one script under controls: start the zygote, run a control, read back what was seen."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ampscope.errors import AmpscopeError, StoreError
from ampscope.experiments.children import child_environment, started
from ampscope.experiments.script_deaths import last_words
from ampscope.experiments.script_output import Followed, as_text, tail
from ampscope.frameworks.names import TORCH
from ampscope.frameworks.pythons import python_for
from ampscope.frameworks.settings import can_apply
from ampscope.observations import Observation
from ampscope.privacy import forget, hide_secrets_of, leave
from ampscope.records import Cadence, RunInfo, RunSpec, State
from ampscope.run.private_files import LOCK
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.temporary import TemporaryFolder, throw_away

MAX_OUTPUT = 20_000
NOTHING = Cadence(histogram=0, trace=0, shadow=0)
HARD_FACTOR, HARD_GRACE_S = 1.5, 10.0  # the child's own watchdog allows 1.5 times and 5 s


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One finished run with everything that was recorded."""

    info: RunInfo
    observations: tuple[Observation, ...]
    output: str  # the end of what the script printed


class ScriptRuns:
    """Serves runs of one script; use as a context manager."""

    def __init__(self, spec: RunSpec, store: Path, *, private: bool = False) -> None:
        """``private``: each run has a copy-on-write view of the files that the script writes, and
        the user's stay as they are; otherwise the script writes for real."""
        self.spec = spec
        self.private = private
        self.store = store
        hide_secrets_of(spec.args)
        self.folder = TemporaryFolder()
        self._process: subprocess.Popen[bytes] | None = None
        self._open: set[str] = set()  # started, and not waited for to the end
        self._started: list[str] = []
        self._done: dict[str, str] = {}  # run -> the zygote's answer
        self._gone = False  # the zygote has ended
        self._changed = threading.Condition()

    def __enter__(self) -> ScriptRuns:
        command = _server(self.spec)
        try:
            with self._own_words().open("wb") as words:
                self._process = subprocess.Popen(
                    [*command, "--store", str(self.store.absolute())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=words,
                    env=child_environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise AmpscopeError(f"Could not start Python: {error.strerror}.") from error
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def can_apply(self, control: str) -> bool:
        """Whether the script's framework has this control or intervention."""
        return self.spec.framework == TORCH or can_apply(control)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            self._end()
        except KeyboardInterrupt:  # a second signal: once more, now as quick as can be
            self._end()
            raise

    def _end(self) -> None:
        process = self._process
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()  # the zygote kills what still runs, and ends
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for run_id in self._open:
            forget(run_id)
            with contextlib.suppress(StoreError):
                self._close_if_open(run_id, State.CANCELLED, "Cancelled.")
        for run_id in self._started:
            throw_away(self._file(run_id, "view"))
        self.folder.cleanup()

    def start(self, control: str, parent: str = "", *, merged: bool = True) -> str:
        """Start a run under ``control``; returns its id at once.

        ``merged``: standard output and standard error of the script go the same way.
        """
        process = self._process
        if process is None or process.stdin is None:
            raise AmpscopeError("ScriptRuns is a context manager: enter it first.")
        spec = replace(self.spec, control=control, parent=parent)
        if parent:  # a control is compared by its losses and ops; histograms are of the first run
            spec = replace(spec, cadence=NOTHING)
        writer = RunWriter.create(self.store, spec)
        writer.close()
        run_id = writer.run_id
        leave(run_id, spec)
        self._open.add(run_id)
        self._started.append(run_id)
        limit = self.spec.time_limit_s * HARD_FACTOR + HARD_GRACE_S
        paths = self._file(run_id, "out"), self._file(run_id, "out" if merged else "err")
        with contextlib.suppress(BrokenPipeError):  # it has ended; waiting for the run says so
            view = self._file(run_id, "view") if self.private else ""
            line = f"{run_id}\t{paths[0]}\t{paths[1]}\t{limit}\t{view}\n"
            process.stdin.write(line.encode())
            process.stdin.flush()
        return run_id

    def wait(self, run_id: str, show: Callable[[str], None] | None = None) -> ScriptRun:
        """Wait for a run; ``show`` gets the script's output as it comes."""
        followed = Followed(self._file(run_id, "out"), as_text(show)) if show else None
        return self._wait(run_id, [followed] if followed else [])

    def pass_through(self, run_id: str, out: BinaryIO, err: BinaryIO) -> ScriptRun:
        """Wait for a run that is not merged, and copy its output byte for byte."""

        def to(stream: BinaryIO) -> Callable[[bytes], None]:
            return lambda part: (stream.write(part), stream.flush())[1]

        pairs = (("out", out), ("err", err))
        return self._wait(run_id, [Followed(self._file(run_id, n), to(s)) for n, s in pairs])

    def run(self, control: str, parent: str = "") -> ScriptRun:
        """Start and wait."""
        return self.wait(self.start(control, parent))

    def first_to_share(self) -> str:
        """Id of the run that was the first to change what runs share; "" when none did."""
        return tail(Path(self.folder.name) / LOCK, MAX_OUTPUT).partition("\n")[0]

    def _wait(self, run_id: str, followed: list[Followed]) -> ScriptRun:
        while True:
            with self._changed:
                ended = run_id in self._done or self._gone
                if not ended:
                    self._changed.wait(0.1)
            for output in followed:
                output.drain()
            if ended:
                break
        said = tail(self._file(run_id, "out"), MAX_OUTPUT)
        last = said + tail(self._file(run_id, "err"), MAX_OUTPUT)
        self._close_if_open(run_id, State.FAILED, last_words(self._answer(run_id), last))
        self._open.discard(run_id)
        throw_away(self._file(run_id, "view"))
        forget(run_id)
        with Reader(self.store) as reader:
            info = reader.run(run_id)
            observations = tuple(reader.observations(run_id))
        return ScriptRun(info, observations, said)

    def _answer(self, run_id: str) -> str:
        """What became of a run's process."""
        if run_id in self._done:
            return self._done[run_id]
        said = [line for line in tail(self._own_words(), MAX_OUTPUT).splitlines() if line.strip()]
        return f"gone: {said[-1].strip()}" if said else "gone"

    def _close_if_open(self, run_id: str, state: State, message: str) -> None:
        """A child that died without a word leaves its run open: say so in its place."""
        with Reader(self.store) as reader:
            now = reader.run(run_id).state
        if now.is_active or now is State.LOST:
            writer = RunWriter(self.store, run_id)
            writer.finish(state, message)
            writer.close()

    def _listen(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        for line in process.stdout:
            run_id, _, status = line.decode().strip().partition("\t")
            with self._changed:
                self._done[run_id] = status
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _file(self, run_id: str, name: str) -> Path:
        return Path(self.folder.name) / f"{run_id}.{name}"

    def _own_words(self) -> Path:
        return Path(self.folder.name) / "zygote.err"


def _server(spec: RunSpec) -> list[str]:
    """The command of the process that starts the runs. Raises BadInput without the framework."""
    if spec.framework == TORCH:
        return [*started("ampscope.run.zygote"), "--script", spec.workload]
    python = python_for(spec.framework)
    return [*started("ampscope.frameworks.server"), "--python", python]
