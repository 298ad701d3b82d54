"""A callback that stays inside ``model.fit``:

    model.fit(x, y, callbacks=[ampscope.frameworks.keras.Watch()])

Every ``fit`` becomes a run of kind "watch": loss, loss scale, skipped steps, learning rate and time
of every batch, read from variables that Keras keeps anyway. The graph stays as it is, so weights
are bit-identical with and without, and nothing is left behind. With ``histograms_every=N`` and
``compile(run_eagerly=True)`` the run holds layers, dtypes and histograms as well, as a probe's.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ampscope.errors import BadInput
from ampscope.frameworks.keras.fit_ends import callback_list, first_words
from ampscope.frameworks.keras.fit_readings import FitReadings
from ampscope.frameworks.keras.loss_scales import is_scaler
from ampscope.frameworks.keras.training import FIRST_REPLICA
from ampscope.frameworks.keras.watch_run import WatchRun, modules_of
from ampscope.frameworks.keras.watching import watching
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.settings import Settings
from ampscope.records import Cadence, State, StepRecord
from ampscope.store.db import default_path

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
        if histograms_every < 0:
            raise BadInput("histograms_every is a number of steps, or 0 for none.")
        self.store = default_path() if store is None else Path(store).expanduser()
        self.histograms_every = histograms_every
        self.label = label
        self.runs: list[str] = []
        self._fit: _Fit | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.close()
        run = WatchRun(self.store, self.model, self.histograms_every, self.label)
        self.runs.append(run.run_id)
        self._fit = _Fit(self.model, run, self.histograms_every)
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
            fit.end(State.FINISHED)


class _Fit:
    """One ``fit`` under way."""

    def __init__(self, model: Any, run: WatchRun, every: int) -> None:
        self.model, self.run = model, run
        self.readings = FitReadings(model)
        self._step = 0
        self._stack = contextlib.ExitStack()
        self._recorder = Recorder(Cadence(every, 0, 0)) if every and model.run_eagerly else None
        if every and not model.run_eagerly:
            run.note("Layers and histograms need compile(run_eagerly=True): graphs hold none.")

    def begin(self) -> None:
        """On: the training function is called through :meth:`_train` until the end."""
        if self._recorder is not None:
            self._recorder.on_step = lambda steps: self._flush()
            self._stack.enter_context(watching(self._recorder, Settings()))
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
        callbacks = callback_list()
        if callbacks is not None:  # it dies with fit, whatever ends fit
            ending = weakref.finalize(callbacks, self._abandoned)
            self._stack.callback(ending.detach)

    def end(self, state: State, message: str = "", details: str = "") -> None:
        """Everything off; again does nothing."""
        with self.run.contained():
            self._stack.close()
            if self.run.is_open and self._recorder is not None:
                self._recorder.take().write(self.run.writer)
        self.run.close(state, message, details)

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
            self._failed(error)
            raise
        ended = time.perf_counter()
        if self.run.is_open and self._recorder is None:
            with self.run.contained():
                self._record(logs, ended - started, ended)
        return logs

    def _record(self, logs: Any, step_time_s: float, ended: float) -> None:
        batch = self.readings.read(logs)
        if not self._step:
            self.run.writer.add_modules(modules_of(self.model))  # built by now
        self.run.writer.add_step(
            StepRecord(
                self._step,
                loss=batch.loss,
                scale=batch.scale,
                growth_counter=batch.counter,
                skipped=batch.skipped,
                lr=batch.lr,
                step_time_s=step_time_s,
                overhead_s=time.perf_counter() - ended,
                ended_at=time.time(),
            )
        )
        self._step += 1
        self.run.writer.flush_if_due()

    def _flush(self) -> None:
        if self._recorder is not None and self.run.is_open:
            with self.run.contained():
                self._recorder.take().write(self.run.writer)
                self.run.writer.flush_if_due()

    def _failed(self, error: BaseException) -> None:
        details = "".join(traceback.format_exception(error))
        words = f"The training raised {first_words(error)}. Its traceback is kept."
        self.end(State.FAILED, words, details)

    def _abandoned(self) -> None:
        """``fit`` ended by an exception that came from elsewhere: validation, another callback."""
        error = getattr(sys, "last_value", None) or sys.exc_info()[1]
        if isinstance(error, BaseException):
            self._failed(error)
        else:
            self.end(State.FAILED, "fit was left by an exception outside the training steps.")
