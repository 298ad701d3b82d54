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
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import paddle

from ampscope.frameworks.fit_ends import on_leaving
from ampscope.frameworks.paddle.layer_paths import LayerPaths
from ampscope.frameworks.paddle.layer_watch import LayerWatch
from ampscope.frameworks.paddle.patching import replaced
from ampscope.frameworks.paddle.regions import OpenRegion
from ampscope.frameworks.paddle.settings_applied import AppliedSettings
from ampscope.frameworks.paddle.step_watch import StepWatch
from ampscope.frameworks.paddle.versions import machine
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.settings import Settings
from ampscope.frameworks.watch_run import WatchOptions, WatchRun
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
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
        self.recorder = recorder = Recorder(spec.cadence)
        recorder.on_step = lambda steps: run.keep(recorder)
        paths = LayerPaths()
        self._steps = StepWatch(recorder, paths, looks=lambda: recorder.wants_tensors)
        in_fp32 = AppliedSettings(Settings(), OpenRegion(), None).in_fp32
        self._layers = LayerWatch(recorder, paths, in_fp32)
        self._layers.sleeps = lambda: not recorder.wants_tensors
        self._layers.scans_batches = False  # evidence for the rules, which judge scripts
        self._left, self._away_s = 0.0, 0.0  # when it was detached last; for how long in all
        run.clock = lambda: time.monotonic() - self._away_s

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Watch what trains inside the block."""
        self._away_s += time.monotonic() - self._left if self._left else 0.0
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._steps.active())
            if self.recorder.cadence.histogram > 0:
                stack.enter_context(self._layers.active())
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
        train_batch = self.model.train_batch

        @functools.wraps(train_batch)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return train_batch(*args, **kwargs)
            except BaseException as error:
                self._end(error)
                raise

        self._stack.enter_context(replaced([(self.model, "train_batch", watched)]))
        self._stack.callback(on_leaving(_CallbackList, self._left))

    def on_train_end(self, logs: object = None) -> None:
        """Ends the run."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._stack.close()
        self.watch.__exit__(None if error is None else type(error), error, None)

    def _left(self, error: BaseException | None) -> None:
        """``fit`` ended by an exception that came from elsewhere: the data, another callback."""
        self._stack.close()
        self.watch.left(error)
