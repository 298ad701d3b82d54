"""All instruments on one training, and off again, for a probe, a script and a watched ``fit``; and
with what and where that training runs.

Functions run as plain Python meanwhile, ``model.fit`` and ``tf.function``: inside a traced graph a
tensor has no numbers to look at. Pipelines of ``tf.data`` stay graphs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from ampscope.ext.frameworks.adapters import ControlSettings, wanted_gpu
from ampscope.ext.frameworks.keras.layers import LayerWatch
from ampscope.ext.frameworks.keras.loss_scales import OwnScaler, control_loss_scales
from ampscope.ext.frameworks.keras.precision import control_precision
from ampscope.ext.frameworks.keras.steps import LossWatch, StepWatch, scan_weights
from ampscope.ext.frameworks.keras.training import KerasTraining
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.patches import Patches
from ampscope.records import Machine, RunSpec
from ampscope.runner.child_frame import host_facts
from ampscope.source_lines import SourceLines, line_name


@contextlib.contextmanager
def watching(recorder: FrameworkRecorder, settings: ControlSettings) -> Iterator[list[str]]:
    """Everything on; the list holds sentences on what could not be seen or done."""
    lines = SourceLines()
    training = KerasTraining(recorder, settings, lambda: line_name(lines.where()))
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


def _conclude(training: KerasTraining) -> None:
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
