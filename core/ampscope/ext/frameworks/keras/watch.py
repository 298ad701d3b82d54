"""A callback that stays inside ``model.fit``:

    model.fit(x, y, callbacks=[ampscope.ext.frameworks.keras.Watch()])

Every ``fit`` becomes a run of kind "watch": loss, loss scale, skipped steps, learning rate and time
of every batch, read from variables that Keras keeps anyway. The graph is not changed, so weights
are bit-identical with and without, and nothing is left behind. With ``histograms_every=N`` and
``compile(run_eagerly=True)`` the run holds layers, dtypes and histograms as well, as a probe's.

Also here: what a running ``fit`` shows, all instruments on one training (:func:`watching`), which a
probe and a script use as well, eager functions, controls of the precision, versions and machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ampscope.ext.frameworks.adapters import ControlSettings, wanted_gpu
from ampscope.ext.frameworks.keras.layers import LayerWatch
from ampscope.ext.frameworks.keras.loss_scales import OwnScaler, control_loss_scales
from ampscope.ext.frameworks.keras.optimizer_state import calls, inner, is_scaler
from ampscope.ext.frameworks.keras.steps import LossWatch, StepWatch, scan_weights
from ampscope.ext.frameworks.keras.training import FIRST_REPLICA, Training, modules_of
from ampscope.ext.frameworks.keras.values import scalar
from ampscope.ext.frameworks.recorder import Recorder
from ampscope.ext.frameworks.watch_run import WatchOptions, WatchRun, on_leaving
from ampscope.patches import Patches
from ampscope.records import Cadence, Machine, RunSpec, State, StepRecord
from ampscope.runner.child_frame import host_facts
from ampscope.source_lines import SourceLines, line_name

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
        self._recorder = Recorder(Cadence(every, 0, 0), run.keep) if looks_inside else None
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


# What a running ``model.fit`` shows without a change to its graph: variables that Keras keeps.
#
# The loss of one batch is read off the running mean that ``fit`` reports: total and count before
# and after. Once a loss was NaN, that mean is NaN until the epoch ends, and later losses are not
# known. A training step of the user's own, which keeps no such mean, reports its loss itself.


Read = Callable[[], float]


class FitReadings:
    """Reads one training; :meth:`begin` once, then :meth:`read` after every batch."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._read: dict[str, Read] = {}
        self._mean = (0.0, 0.0)
        self._scale: float | None = None
        self._steps = 0.0
        self._schedule: Any = None
        self._rate: float | None = None
        self._means: dict[str, Read] = {}  # of the loss: total and count

    def begin(self) -> None:
        """Before the first batch."""
        optimizer = self._model.optimizer
        if optimizer is None:
            return
        if is_scaler(optimizer):
            self._scale = float(optimizer.initial_scale)
        stepping = inner(optimizer)
        if not isinstance(stepping._learning_rate, keras.Variable):
            # A schedule is a dozen kernels: one graph is four times as fast.
            self._schedule = tf.function(stepping._get_current_learning_rate, autograph=False)
            self._rate = float(self._schedule())
        self._prepare()
        if self._read:  # built before: a training that goes on
            self._steps = self._read["steps"]()
            self._scale = self._read["scale"]() if "scale" in self._read else None

    def begin_epoch(self) -> None:
        """Keras has reset its means, or has not."""
        self._mean = self._mean_now()

    def read(self, logs: Any, step: int) -> StepRecord:
        """After a batch, or ``steps_per_execution`` of them, without their times."""
        self._prepare()
        now = {name: read() for name, read in self._read.items()}
        scale, self._scale = self._scale, now.get("scale", self._scale)
        before, self._steps = self._steps, now.get("steps", self._steps)
        return StepRecord(
            step,
            loss=self._loss(logs),
            scale=scale,
            growth_counter=int(now["counter"]) if "counter" in now else None,
            skipped="counter" in now and now["steps"] == before,
            lr=now["lr"] if "lr" in now else self._scheduled(),
        )

    def _scheduled(self) -> float | None:
        """The rate of the step that has ended; the schedule itself is at the next one."""
        if self._schedule is None:
            return None
        rate, self._rate = self._rate, float(self._schedule())
        return rate

    def _prepare(self) -> None:
        """Readers of what has been built by now."""
        optimizer = self._model.optimizer
        if self._read or optimizer is None or not optimizer.built:
            return
        stepping = inner(optimizer)
        self._read["steps"] = _reader(calls(optimizer))
        if is_scaler(optimizer):
            self._read["scale"] = _reader(optimizer.dynamic_scale)
            self._read["counter"] = _reader(optimizer.step_counter)
        if self._schedule is None:
            self._read["lr"] = _reader(stepping._learning_rate)

    def _loss(self, logs: Any) -> float | None:
        total, count = self._mean_now()
        before, self._mean = self._mean, (total, count)
        if count < before[1]:
            before = (0.0, 0.0)
        if count > before[1]:
            if not math.isfinite(before[0]):
                return None
            return (total - before[0]) / (count - before[1])
        return scalar(logs.get("loss")) if isinstance(logs, dict) else None

    def _mean_now(self) -> tuple[float, float]:
        tracker = getattr(self._model, "_loss_tracker", None)
        if tracker is None:
            return 0.0, 0.0
        if "total" not in self._means:
            self._means = {"total": _reader(tracker.total), "count": _reader(tracker.count)}
        return self._means["total"](), self._means["count"]()


def _reader(variable: Any) -> Read:
    """A fast read of a Keras variable. Of one that each replica adds to on its own, the sum; of any
    other that several devices have, the first."""
    value = variable._value
    if isinstance(value, tf.distribute.DistributedValues):
        parts = [_read_one(part) for part in value.values]
        if value.aggregation == tf.VariableAggregation.SUM:
            return lambda: sum(read() for read in parts)
        return parts[0]
    return _read_one(value)


def _read_one(value: Any) -> Read:
    handle, dtype = value.handle, value.dtype
    return lambda: float(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)._numpy())


# All instruments on one training, and off again.


@contextlib.contextmanager
def watching(recorder: Recorder, settings: ControlSettings) -> Iterator[list[str]]:
    """Everything on; the list holds sentences on what could not be seen or done."""
    lines = SourceLines()
    training = Training(recorder, settings, lambda: line_name(lines.where()))
    if keras.backend.backend() != "tensorflow":
        training.note(
            f"Keras runs on {keras.backend.backend()} here: only its TensorFlow backend is watched."
        )
        yield training.notes
        return
    scaler = OwnScaler(settings.add_scaler)
    with functions_run_eagerly():
        try:
            with Patches() as patches:
                keep_functions_eager(patches, training.note)
                control_precision(patches, settings.precision)
                control_loss_scales(patches, training)
                LayerWatch(training).put_on(patches)
                LossWatch(training, scaler).put_on(patches)
                StepWatch(training, scaler).put_on(patches)
                yield training.notes
        finally:
            _conclude(training)


def _conclude(training: Training) -> None:
    scan_weights(training, "end")
    settings, recorder = training.settings, training.recorder
    if settings.precision == "fp32" and recorder.half_seen:
        seen = " and ".join(sorted(recorder.half_seen))
        training.note(f"Some layers computed in {seen} although this control asked for fp32.")
    asked = os.environ.get("KERAS_BACKEND", "")
    if asked not in ("", keras.backend.backend()):  # by the script: Keras was imported before it
        training.note(
            f"The script asks for Keras on {asked}; it was run on TensorFlow, the backend that is "
            "watched."
        )
    if not recorder.steps:
        training.note(_nothing_seen())


def _nothing_seen() -> str:
    if "tf_keras" in sys.modules:
        return (
            "Nothing was recorded: the script trains with tf_keras (Keras 2), which is not "
            "watched. Keras 3 is, on TensorFlow 2.16 or newer."
        )
    if not tf.executing_eagerly():
        return (
            "Nothing was recorded: the script has switched TensorFlow 2's eager mode off. "
            "Sessions and estimators of TensorFlow 1 are not watched."
        )
    return "Nothing was recorded: no optimizer of Keras 3 was stepped."


# Functions run as plain Python while something is watched: ``model.fit`` and ``tf.function``.
#
# Inside a traced graph a tensor has no numbers to look at. Pipelines of ``tf.data`` stay graphs.


@contextlib.contextmanager
def functions_run_eagerly() -> Iterator[None]:
    """Puts back what was set before."""
    before = tf.config.functions_run_eagerly()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tf.data functions.*", category=UserWarning)
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(before)


def keep_functions_eager(patches: Patches, note: Callable[[str], None]) -> None:
    """A script that wants graphs back does not get them; ``note`` takes a sentence on it."""

    def run_functions_eagerly(original: Any, run_eagerly: bool) -> None:
        if not run_eagerly:
            note(
                "The script asks for graphs (run_functions_eagerly(False)); its functions were run "
                "eagerly, because inside a graph there are no numbers to look at."
            )

    patches.wrap(tf.config, "run_functions_eagerly", run_functions_eagerly)


# Controls that change the precision of a whole script: everything in fp32, or fp16 as bf16.
#
# A dtype policy is read from its name, so the name keeps what the script asked for
# ("mixed_float16") and the dtypes that it stands for change. Casts that the script makes itself
# follow. Weights that would have been made in half precision get those very values: random numbers
# differ by dtype, and runs that begin apart cannot be compared step by step.


_DTYPES = {
    "fp32": {"float16": "float32", "bfloat16": "float32"},
    "bf16": {"float16": "bfloat16"},
}


class _Wide(str):
    """A dtype that stands for ``narrow``, which the script asked for."""

    __slots__ = ("narrow",)
    narrow: str


class _Replacing:
    """The dtypes that stand for others."""

    def __init__(self, instead: dict[str, str]) -> None:
        self.instead = instead
        self.is_paused = False  # while weights get the values that they would have had

    def parse_name(self, original: Any, policy: Any, name: Any) -> tuple[str, str]:
        """``DTypePolicy._parse_name``."""
        compute, variable = original(policy, name)
        compute = self.instead.get(compute, compute)
        if variable not in self.instead:
            return compute, variable
        wide = _Wide(self.instead[variable])
        wide.narrow = variable
        return compute, wide

    def initialize(self, original: Any, variable: Any, initializer: Any) -> None:
        """``Variable._initialize_with_initializer``."""
        narrow = getattr(variable._dtype, "narrow", None)
        wide = str(variable._dtype)

        def in_narrow(shape: Any, dtype: Any = None, **kwargs: Any) -> Any:
            self.is_paused = True
            try:
                values = initializer(shape, dtype=narrow, **kwargs)
            finally:
                self.is_paused = False
            return keras.ops.cast(values, wide)

        original(variable, initializer if narrow is None else in_narrow)

    def cast(self, original: Any, x: Any, dtype: Any, name: str | None = None) -> Any:
        """``tf.cast``, through which Keras' own casts go as well."""
        if self.is_paused:
            return original(x, dtype, name=name)
        try:
            asked = tf.as_dtype(dtype).name
        except TypeError:
            return original(x, dtype, name=name)
        return original(x, self.instead.get(asked, dtype), name=name)


def control_precision(patches: Patches, precision: str) -> None:
    """``precision`` is fp32 or bf16; "" changes nothing."""
    if not precision:
        return
    replacing = _Replacing(_DTYPES[precision])
    patches.wrap(keras.DTypePolicy, "_parse_name", replacing.parse_name)
    patches.wrap(keras.Variable, "_initialize_with_initializer", replacing.initialize)
    patches.wrap(tf, "cast", replacing.cast)


# With what, and where, a run takes place.


def versions() -> str:
    """``3.15.1 on TensorFlow 2.21.0``."""
    return f"{keras.__version__} on TensorFlow {tf.__version__}"


def choose_device(spec: RunSpec) -> None:
    """Let TensorFlow see no other device than the one that was asked for, if one was; before it has
    computed anything. Raises BadInput for one that is not there."""
    gpus = tf.config.list_physical_devices("GPU")
    number = wanted_gpu(spec.device, len(gpus), "TensorFlow")
    if spec.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    elif number is not None:
        tf.config.set_visible_devices(gpus[number], "GPU")


def machine(spec: RunSpec) -> Machine:
    """The first GPU that TensorFlow may use; else the CPU."""
    gpus = tf.config.get_visible_devices("GPU")
    here, capability = host_facts(), ""
    if gpus:
        details = tf.config.experimental.get_device_details(gpus[0])
        name = str(details.get("device_name", "GPU"))
        capability = ".".join(map(str, details.get("compute_capability", ())))
    else:
        name = here.cpu
    return Machine(
        device=f"cuda:{gpus[0].name.rpartition(':')[2]}" if gpus else "cpu",
        device_name=name,
        policy="cuda" if gpus else "native",
        capability=capability,
        python=here.python,
        platform=here.platform,
        host=here.host,
        framework="keras",
        framework_version=versions(),
        arithmetic="real",
        scaler="real" if spec.kind != "probe" or spec.precision == "fp16" else "",
    )
