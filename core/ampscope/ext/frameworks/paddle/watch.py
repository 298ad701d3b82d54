"""One line in a user's own training: a run of kind "watch" in the store.

    with Watch():
        train()

    model.fit(…, callbacks=[WatchCallback()])

Loss, scale, skips and learning rate of every step; with ``histograms_every=N`` also layers,
activations, gradients and weights of every N-th step. Nothing is changed: on a CPU, where Paddle's
AMP does nothing, it goes on doing nothing. Fp16 rehearsed on a CPU is ``ampscope run``'s matter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.paddle.applied_settings import AppliedSettings
from ampscope.ext.frameworks.paddle.instruments import machine
from ampscope.ext.frameworks.paddle.layer_paths import LayerPaths
from ampscope.ext.frameworks.paddle.layers import LayerWatch
from ampscope.ext.frameworks.paddle.regions import OpenRegion
from ampscope.ext.frameworks.paddle.steps import StepWatch
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.ext.frameworks.watch_run import WatchOptions, WatchRun, on_leaving
from ampscope.patches import Patches
from ampscope.records import RunSpec, State

_Callback: Any = paddle.callbacks.Callback
_CallbackList: Any = paddle.hapi.callbacks.CallbackList


class Watch:
    """Records the training inside ``with``.

    Args:
        store: the file to write, default as everywhere.
        histograms_every: steps from one set of histograms to the next; 0 takes none.
        label: what the run is called.

    ``runs`` holds the ids of the runs that were written, the newest last.
    """

    def __init__(
        self, store: str | Path | None = None, histograms_every: int = 0, label: str = ""
    ) -> None:
        self.options = WatchOptions.of(store, histograms_every, label)
        self.runs: list[str] = []
        self._training: _Training | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        self.open()
        self._stack.enter_context(self.attached())
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._stack.close()
        training = self._end()
        if training is not None and error is not None:
            training.run.failed(error)
        elif training is not None:
            training.run.close(State.FINISHED)

    def open(self) -> None:
        """Begin a run in the store; nothing is watched yet."""
        self.close()
        spec = self.options.spec("paddle")
        run = WatchRun.opened(self.options, spec, machine)
        if run is not None:
            self.runs.append(run.run_id)
            self._training = _Training(run, spec)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch what trains inside the block."""
        with contextlib.ExitStack() as stack:
            if self._training is not None:
                stack.enter_context(self._training.attached())
            yield

    def close(self) -> None:
        """End the run that is open."""
        self.__exit__(None, None, None)

    def left(self, error: BaseException | None) -> None:
        """A ``fit`` was left by an exception, which may not be known."""
        self._stack.close()
        training = self._end()
        if training is not None:
            training.run.left(error)

    def _end(self) -> _Training | None:
        """What was under way; nothing more comes of it."""
        training, self._training = self._training, None
        if training is not None:
            training.run.take(training.recorder)
        return training


class _Training:
    """One run, and the instruments that write it."""

    def __init__(self, run: WatchRun, spec: RunSpec) -> None:
        self.run = run
        self.recorder = FrameworkRecorder(spec.cadence, run.keep)
        paths = LayerPaths()
        self._steps = StepWatch(self.recorder, paths, is_sparing=True)
        in_fp32 = AppliedSettings(ControlSettings(), OpenRegion(), None).in_fp32
        self._layers = LayerWatch(self.recorder, paths, in_fp32, is_sparing=True)
        self._left = 0.0  # when it was detached last

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch what trains inside the block."""
        self.run.away_s += time.monotonic() - self._left if self._left else 0.0
        with Patches() as patches:
            self._steps.put_on(patches)
            if self.recorder.cadence.histogram > 0:
                self._layers.put_on(patches)
            yield
        self._left = time.monotonic()


class WatchCallback(_Callback):  # type: ignore[misc]  # Paddle has no types
    """:class:`Watch` for ``paddle.Model.fit``; the same arguments, and ``runs`` as well."""

    def __init__(
        self, store: str | Path | None = None, histograms_every: int = 0, label: str = ""
    ) -> None:
        super().__init__()
        self.watch = Watch(store, histograms_every, label)
        self.runs = self.watch.runs
        self._stack = contextlib.ExitStack()

    def on_train_begin(self, logs: object = None) -> None:
        """Begins to record."""
        self._end(None)
        self.watch.__enter__()
        patches = self._stack.enter_context(Patches())
        patches.wrap(self.model, "train_batch", self._train_batch)
        self._stack.callback(on_leaving(_CallbackList, self._left))

    def on_train_end(self, logs: object = None) -> None:
        """Ends the run."""
        self._end(None)

    def _train_batch(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        self._stack.close()
        self.watch.__exit__(None if error is None else type(error), error, None)

    def _left(self, error: BaseException | None) -> None:
        """``fit`` ended by an exception that came from elsewhere: the data, another callback."""
        self._stack.close()
        self.watch.left(error)
