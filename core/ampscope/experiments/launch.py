"""Start a probe as a child process that outlives its parent, and follow it through the store."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ampscope.errors import AmpscopeError
from ampscope.experiments.script_deaths import last_words
from ampscope.experiments.validate import checked
from ampscope.frameworks.names import TORCH
from ampscope.frameworks.pythons import python_for, with_package
from ampscope.records import RunInfo, RunSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

POLL_S = 0.1
MAX_WORDS = 4_000  # of the end of what a child said
_SECRETS = "AMPSCOPE_CLASSROOM_"


def launch(spec: RunSpec, store: Path) -> str:
    """Register the run as queued, start its process, return the run's id.

    Raises BadInput for a spec that cannot work, StoreError when the store cannot be written.
    """
    spec = checked(spec)
    writer = RunWriter.create(store, spec)
    try:
        _spawn(spec, store, writer.run_id)
    except OSError as error:
        writer.finish(State.FAILED, f"Could not start Python: {error.strerror}.")
        raise AmpscopeError(f"Could not start Python: {error.strerror}.") from error
    finally:
        writer.close()
    return writer.run_id


def follow(store: Path, run_id: str, poll_s: float = POLL_S) -> Iterator[RunInfo]:
    """The run's state again and again; the last item is its final one."""
    with Reader(store) as reader:
        while True:
            info = reader.run(run_id)
            yield info
            if not info.state.is_active:
                return
            time.sleep(poll_s)


def child_environment() -> dict[str, str]:
    """The child's environment. libgomp's threads spin while they wait; on a machine that also does
    something else, that made a small GPT's step 20 times slower (measured, 2 cores), so they sleep
    unless the user decided otherwise. A class's secrets stay with its server."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
    return {"OMP_WAIT_POLICY": "PASSIVE", **own, "PYTHONUNBUFFERED": "1"}


def _spawn(spec: RunSpec, store: Path, run_id: str) -> None:
    python, environment = sys.executable, child_environment()
    module = "ampscope.run"
    if spec.framework != TORCH:
        python, environment = python_for(spec.framework), with_package(environment)
        module = "ampscope.frameworks.child"
    words = tempfile.TemporaryFile()  # noqa: SIM115  # the thread that waits closes it
    child = subprocess.Popen(
        [python, "-m", module, "--store", str(store.absolute()), "--run", run_id],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=words,
        start_new_session=True,  # Ctrl-C reaches the parent only; it asks the child to stop
        env=environment,
    )

    def wait() -> None:
        with words:
            _say_how_it_died(store, run_id, child.wait(), _end_of(words))

    # Somebody must wait for it: an ended child stays a zombie, and Popen warns of one left behind.
    threading.Thread(target=wait, name=f"ampscope-run-{run_id}", daemon=True).start()


def _end_of(words: IO[bytes]) -> str:
    size = os.fstat(words.fileno()).st_size
    return os.pread(words.fileno(), MAX_WORDS, max(0, size - MAX_WORDS)).decode(errors="replace")


def _say_how_it_died(store: Path, run_id: str, status: int, words: str) -> None:
    """A child that crashed in native code, or could not even start, has not said so itself. One
    that was killed stays as it is: a reader shows it as lost."""
    if status in (0, -signal.SIGKILL, -signal.SIGTERM):
        return
    with contextlib.suppress(AmpscopeError):  # a store that is gone needs no last words
        with Reader(store) as reader:
            ended = reader.run(run_id).ended is not None
        if not ended:
            writer = RunWriter(store, run_id)
            writer.finish(State.FAILED, last_words(str(status), words, "The run"), words)
            writer.close()
