"""The run of one watched ``fit`` in the store: written beside the training, never in its way.

Where the store fails (a full disk), one warning says so and the training goes on unrecorded.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from ampscope.errors import AmpscopeError
from ampscope.frameworks.keras.layer_paths import LayerPaths, module_record
from ampscope.frameworks.keras.versions import machine
from ampscope.records import Cadence, Event, ModuleRecord, RunSpec, State
from ampscope.store.processes import HEARTBEAT_EVERY_S
from ampscope.store.writer import RunWriter


class WatchRun:
    """One run; every method does nothing once it is closed."""

    def __init__(self, store: Path, model: Any, every: int, label: str) -> None:
        spec = RunSpec(
            workload=sys.argv[0] or "notebook",
            kind="watch",
            size="",
            precision="",  # whatever the training does; the recorded dtypes say it
            steps=0,
            policy="native",
            cadence=Cadence(histogram=every, trace=0, shadow=0),
            time_limit_s=0.0,
            label=label or str(model.name),
            framework="keras",
        )
        self.writer = RunWriter.create(store, spec)
        self.run_id = self.writer.run_id
        self.is_open = True
        self.writer.start(machine(spec))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ampscope-heartbeat", daemon=True)
        self._thread.start()

    def note(self, text: str, step: int = 0) -> None:
        """What cannot be seen, and why."""
        if self.is_open:
            self.writer.add_event(Event(step, "note", "cannot be seen", text))

    @contextlib.contextmanager
    def contained(self) -> Any:
        """An error of ampscope's own ends the recording, and not the training."""
        try:
            yield
        except Exception as error:
            sentence = str(error) if isinstance(error, AmpscopeError) else repr(error)
            warnings.warn(f"ampscope records no more of this training: {sentence}", stacklevel=3)
            self.close(State.FAILED, f"The recording ended early: {sentence}")

    def close(self, state: State, message: str = "", details: str = "") -> None:
        """Once."""
        if not self.is_open:
            return
        self.is_open = False
        self._ended.set()
        with contextlib.suppress(AmpscopeError):
            self.writer.finish(state, message, details)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_EVERY_S):
            with contextlib.suppress(AmpscopeError):
                self.writer.beat()


def modules_of(model: Any) -> list[ModuleRecord]:
    """The layers of a model that has its weights, from the root down."""
    paths = LayerPaths()
    paths.of(model, None)
    if not paths.is_built():
        return []
    layers = enumerate(paths.layers())
    return [replace(module_record(path, layer), index=i) for i, (path, layer) in layers]
