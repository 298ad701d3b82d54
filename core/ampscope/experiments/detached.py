"""Diagnoses and re-runs as processes of their own, which outlive whoever starts them.

job = start_diagnosis(Path("train.py"), store)      # returns at once
is_running(job); last_words(job); stop(job)

What they find goes to the store. Between the start of such a process and its first run in the store
lie a second or two, in which only the process itself tells that something is under way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ampscope.errors import AmpscopeError
from ampscope.experiments.children import child_environment, started
from ampscope.experiments.repeat import is_module, repeatable
from ampscope.records import RunSpec
from ampscope.store.reader import Reader

DIAGNOSED = (0, 1)  # exit statuses of ``ampscope diagnose``: no fault, fault
MAX_WORDS = 4_000  # of the end of what a process said
_REPORTED = "Judged under"  # how the last paragraph of a printed diagnosis begins
_LAST_LINES = 20  # in which it stands; notes make it long


@dataclass(frozen=True, slots=True)
class Job:
    """A process that was started here."""

    pid: int
    folder: str  # in which it runs


def start_diagnosis(script: Path, store: Path, *, policy: str = "native", steps: int = 0) -> Job:
    """``ampscope diagnose`` of one script. ``policy`` is native or cuda; 0 ``steps`` are its own
    default."""
    command = ["ampscope.cli.main", "diagnose", "--quiet", "--store", str(store.absolute())]
    command += ["--policy", policy, *(["--steps", str(steps)] if steps else []), str(script)]
    return _start(command, script.parent)


def start_controls(store: Path, run_id: str, controls: Sequence[str]) -> Job:
    """Run the script of ``run_id`` again under ``controls``, in the same group.

    Raises BadInput when ``run_id`` is no script's run or its file is gone.
    """
    with Reader(store) as reader:
        spec = repeatable(reader.run(run_id))
    command = ["ampscope.experiments.repeat", "--store", str(store.absolute()), "--run", run_id]
    return _start([*command, "--", *controls], folder_of(spec))


def folder_of(spec: RunSpec) -> Path:
    """Where a script is run again: in its own folder; a module where this process is."""
    return Path.cwd() if is_module(spec) else Path(spec.workload).parent


def is_running(job: Job) -> bool:
    """Whether the process is still there."""
    process = _started.get(job.pid)
    return process is not None and process.poll() is None


def last_words(job: Job) -> str:
    """Why it could not do its work: the last line that it said; "" when it did, or still runs."""
    process = _started.get(job.pid)
    if process is None or process.poll() is None or process.returncode in DIAGNOSED:
        return ""
    lines = [line.strip() for line in _said(job).splitlines() if line.strip()]
    if any(line.startswith(_REPORTED) for line in lines[-_LAST_LINES:]):
        return ""  # a report was printed: undetermined is a verdict too, and the page shows it
    said = lines[-1].removeprefix("ampscope: ") if lines else ""
    return said or f"It ended with status {process.returncode} and said nothing."


def stop(job: Job) -> None:
    """End it as Ctrl-C would; the script's runs die with the process that waits for them."""
    if is_running(job):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGINT)


# A reference keeps Popen from warning and lets an ended child be reaped. The file holds what it
# said; it has no name, so nothing is left behind.
_started: dict[int, subprocess.Popen[bytes]] = {}
_words: dict[int, int] = {}  # pid -> file descriptor


def _start(arguments: Sequence[str], folder: Path) -> Job:
    with tempfile.TemporaryFile() as words:
        try:
            process = subprocess.Popen(
                [*started(arguments[0]), *arguments[1:]],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                cwd=folder,
                start_new_session=True,
                env=child_environment(),
            )
        except OSError as error:
            raise AmpscopeError(f"Could not start Python in {folder}: {error.strerror}.") from error
        _words[process.pid] = os.dup(words.fileno())
    _started[process.pid] = process
    return Job(process.pid, str(folder))


def _said(job: Job) -> str:
    descriptor = _words[job.pid]
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, MAX_WORDS, max(0, size - MAX_WORDS)).decode(errors="replace")
