"""Start a probe as a child process that outlives its parent, and follow it through the store."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ampscope.errors import AmpscopeError
from ampscope.experiments.validate import checked
from ampscope.frameworks.names import TORCH
from ampscope.frameworks.pythons import python_for, with_package
from ampscope.records import RunInfo, RunSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

POLL_S = 0.1
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
    child = subprocess.Popen(
        [python, "-m", module, "--store", str(store.absolute()), "--run", run_id],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the parent only; it asks the child to stop
        env=environment,
    )
    # Somebody must wait for it: an ended child stays a zombie, and Popen warns of one left behind.
    threading.Thread(target=child.wait, name=f"ampscope-run-{run_id}", daemon=True).start()
