"""A callback that stays inside ``model.fit``:

    model.fit(x, y, callbacks=[ampscope.ext.frameworks.keras.Watch()])

Every ``fit`` becomes a run of kind "watch": loss, loss scale, skipped steps, learning rate and time
of every batch, read from variables that Keras keeps anyway. The graph is not changed, so weights
are bit-identical with and without, and nothing is left behind. With ``histograms_every=N`` and
``compile(run_eagerly=True)`` the run holds layers, dtypes and histograms as well, as a probe's.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.keras.fit_readings import FitReadings
from ampscope.ext.frameworks.keras.instruments import machine, watching
from ampscope.ext.frameworks.keras.optimizer_state import is_scaler
from ampscope.ext.frameworks.keras.training import FIRST_REPLICA, modules_of
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.ext.frameworks.watch_run import WatchOptions, WatchRun, on_leaving
from ampscope.records import Cadence, State

_ENDS = (StopIteration, tf.errors.OutOfRangeError)  # of the data, not of the training


class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """Watches every ``fit`` that it is given to.

    Args:
        store: the file to write, default as everywhere.
        histograms_every: steps from one set of histograms to the next; 0 takes none.
        label: what the run is called; default the model's name.

    ``runs`` holds the ids of the runs that were written, the newest last.
    """

    def __init__(
        self, store: str | Path | None = None, histograms_every: int = 0, label: str = ""
    ) -> None:
        super().__init__()
        self.options = WatchOptions.of(store, histograms_every, label)
        self.runs: list[str] = []
        self._fit: _Fit | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.close()
        spec = self.options.spec("keras", str(self.model.name))
        run = WatchRun.opened(self.options, spec, machine)
        if run is None:
            return
        self.runs.append(run.run_id)
        self._fit = _Fit(self.model, run, self.options.histograms_every)
        with run.contained():
            self._fit.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._fit is not None:
            with self._fit.run.contained():
                self._fit.readings.begin_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        self.close()

    def close(self) -> None:
        """End the run that is open, as `fit` does by itself when it returns."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.end()
            fit.run.close(State.FINISHED)


class _Fit:
    """One ``fit`` under way."""

    def __init__(self, model: Any, run: WatchRun, every: int) -> None:
        self.model, self.run = model, run
        self.readings = FitReadings(model)
        self._step = 0
        self._stack = contextlib.ExitStack()
        looks_inside = every > 0 and model.run_eagerly
        self._recorder = FrameworkRecorder(Cadence(every, 0, 0), run.keep) if looks_inside else None
        self._lacks_layers = every > 0 and not model.run_eagerly

    def begin(self) -> None:
        """On: the training function is called through :meth:`_train` until the end."""
        if self._recorder is not None:
            self._stack.enter_context(watching(self._recorder, ControlSettings()))
        if self._lacks_layers:
            self.run.note("Layers and histograms need compile(run_eagerly=True): graphs hold none.")
        if self.model.steps_per_execution > 1:
            self.run.note(
                f"One record stands for {self.model.steps_per_execution} steps"
                " (steps_per_execution)."
            )
        if self.model.distribute_strategy.num_replicas_in_sync > 1 and is_scaler(
            self.model.optimizer
        ):
            self.run.note(FIRST_REPLICA)
        self.readings.begin()
        original = self.model.train_function

        def train_function(iterator: Any) -> Any:
            return self._train(original, iterator)

        self.model.train_function = train_function
        self._stack.callback(self._put_back, train_function, original)
        self._stack.callback(on_leaving(keras.callbacks.CallbackList, self._left))

    def end(self) -> None:
        """Everything off, and nothing more to come; again does nothing."""
        with self.run.contained():
            self._stack.close()
        if self._recorder is not None:
            self.run.take(self._recorder)

    def _put_back(self, ours: Any, original: Any) -> None:
        if self.model.train_function is ours:
            self.model.train_function = original

    def _train(self, original: Any, iterator: Any) -> Any:
        started = time.perf_counter()
        try:
            logs = original(iterator)
        except _ENDS:
            raise
        except BaseException as error:
            self.end()
            self.run.failed(error)
            raise
        ended = time.perf_counter()
        if self.run.is_open and self._recorder is None:
            with self.run.contained():
                self._record(logs, ended - started, ended)
        return logs

    def _record(self, logs: Any, step_time_s: float, ended: float) -> None:
        step = self.readings.read(logs, self._step)
        if not self._step:
            self.run.writer.add_modules(modules_of(self.model))  # built by now
        overhead_s = time.perf_counter() - ended
        self.run.writer.add_step(
            replace(step, step_time_s=step_time_s, overhead_s=overhead_s, ended_at=time.time())
        )
        self._step += 1
        self.run.write_if_due()

    def _left(self, error: BaseException | None) -> None:
        """``fit`` ended by an exception that came from elsewhere: validation, another callback."""
        self.end()
        self.run.left(error)
