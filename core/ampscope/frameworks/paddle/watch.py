"""One line in someone's own training: a run of kind "watch" in the store.

    with Watch():
        train()

    model.fit(…, callbacks=[WatchCallback()])

Loss, scale, skips and learning rate of every step; with ``histograms_every=N`` also layers,
activations, gradients and weights of every N-th step. Nothing is changed: on a CPU, where Paddle's
AMP does nothing, it goes on doing nothing. Fp16 rehearsed on a CPU is ``ampscope run``'s matter.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import paddle

from ampscope.frameworks.paddle.layer_paths import LayerPaths
from ampscope.frameworks.paddle.layer_watch import LayerWatch
from ampscope.frameworks.paddle.regions import OpenRegion
from ampscope.frameworks.paddle.settings_applied import AppliedSettings
from ampscope.frameworks.paddle.step_watch import StepWatch
from ampscope.frameworks.paddle.versions import machine
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.settings import Settings
from ampscope.records import Cadence, RunSpec, State
from ampscope.store.db import default_path
from ampscope.store.writer import RunWriter

_Callback: Any = paddle.callbacks.Callback
WRITING_SHARE = 0.01  # of the training's time goes into writing at most
LONGEST_PAUSE_S = 5.0  # the run counts as alive by what it writes


class Watch:
    """Records the training inside ``with``. ``run_id`` names the run."""

    def __init__(
        self, *, histograms_every: int = 0, store: Path | str | None = None, name: str = ""
    ) -> None:
        cadence = Cadence(histogram=histograms_every, trace=0, shadow=0)
        self._spec = RunSpec(
            workload=sys.argv[0] or "notebook", kind="watch", size="", precision="", steps=0,
            policy="native", cadence=cadence, time_limit_s=0.0, label=name, framework="paddle",
        )  # fmt: skip
        self._store = Path(store) if store is not None else default_path()
        self._recorder = Recorder(cadence)
        self._recorder.on_step = self._step
        paths = LayerPaths()
        wants = self._recorder
        self._steps = StepWatch(wants, paths, looks=lambda: wants.wants_tensors)
        self._layers = LayerWatch(
            wants, paths, AppliedSettings(Settings(), OpenRegion(), None).in_fp32
        )
        self._layers.sleeps = lambda: not wants.wants_tensors
        self._layers.scans_batches = False  # evidence for the rules, which judge scripts
        self._left, self._away_s = 0.0, 0.0  # when it was detached last; for how long in all
        self._next_write = 0.0
        self._stack = contextlib.ExitStack()
        self._writer: RunWriter | None = None
        self.run_id = ""

    def __enter__(self) -> Watch:
        self.open()
        self._stack.enter_context(self.attached())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stack.close()
        self.close("" if error is None else f"The training raised {type(error).__name__}.")

    def open(self) -> None:
        """Begin the run in the store; nothing is watched yet."""
        self._writer = RunWriter.create(self._store, self._spec)
        self.run_id = self._writer.run_id
        self._writer.start(machine(self._spec))

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch what trains inside the block."""
        self._away_s += time.monotonic() - self._left if self._left else 0.0
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._steps.active())
            if self._spec.cadence.histogram > 0:
                stack.enter_context(self._layers.active())
            yield
        self._left = time.monotonic()

    def close(self, error: str = "") -> None:
        """End the run in the store."""
        if self._writer is not None:
            self._write()
            self._writer.finish(State.FAILED if error else State.FINISHED, error)
            self._writer = None

    def _looks(self) -> bool:
        return self._recorder.wants_tensors

    def _step(self, steps: int) -> None:
        now = time.monotonic() - self._away_s
        if now >= self._next_write:
            self._write()
            took = time.monotonic() - self._away_s - now
            self._next_write = now + min(took / WRITING_SHARE, LONGEST_PAUSE_S)

    def _write(self) -> None:
        if self._writer is not None:
            self._recorder.take().write(self._writer)
            self._writer.flush()
            self._recorder.forget()


class WatchCallback(_Callback):  # type: ignore[misc]  # Paddle has no types
    """:class:`Watch` for ``paddle.Model.fit``; the same arguments."""

    def __init__(
        self, *, histograms_every: int = 0, store: Path | str | None = None, name: str = ""
    ) -> None:
        super().__init__()
        self.watch = Watch(histograms_every=histograms_every, store=store, name=name)

    def on_train_begin(self, logs: object = None) -> None:
        """Begins to record."""
        self.watch.__enter__()

    def on_train_end(self, logs: object = None) -> None:
        """Ends the run."""
        self.watch.__exit__(None, None, None)
