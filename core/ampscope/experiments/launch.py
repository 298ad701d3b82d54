"""Start a probe as a child process that outlives its parent, and follow it through the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ampscope.errors import AmpscopeError
from ampscope.experiments.children import spawn
from ampscope.experiments.validate import checked
from ampscope.privacy import leave
from ampscope.records import RunInfo, RunSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

POLL_S = 0.1


def launch(spec: RunSpec, store: Path) -> str:
    """Register the run as queued, start its process, return the run's id.

    Raises BadInput for a spec that cannot work, StoreError when the store cannot be written.
    """
    spec = checked(spec)
    writer = RunWriter.create(store, spec)
    try:
        leave(writer.run_id, spec)
        spawn(spec, store, writer.run_id)
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
