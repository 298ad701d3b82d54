"""All instruments on one training, and off again."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import keras
import tensorflow as tf

from ampscope.capture.script.patches import Patches
from ampscope.capture.script.source_lines import SourceLines, line_name
from ampscope.frameworks.keras.eager import functions_run_eagerly, keep_functions_eager
from ampscope.frameworks.keras.layer_watch import LayerWatch
from ampscope.frameworks.keras.loss_scales import OwnScaler, control_loss_scales
from ampscope.frameworks.keras.loss_watch import LossWatch
from ampscope.frameworks.keras.precision import control_precision
from ampscope.frameworks.keras.step_watch import StepWatch, scan_weights
from ampscope.frameworks.keras.training import Training
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.settings import Settings


@contextlib.contextmanager
def watching(recorder: Recorder, settings: Settings) -> Iterator[list[str]]:
    """Everything on; the list holds sentences on what could not be seen or done."""
    lines = SourceLines()
    training = Training(recorder, settings, lambda: line_name(lines.where()))
    if keras.backend.backend() != "tensorflow":
        training.note(
            f"Keras runs on {keras.backend.backend()} here: only its TensorFlow backend is watched."
        )
        yield training.notes
        return
    patches = Patches()
    scaler = OwnScaler(settings.add_scaler)
    with functions_run_eagerly():
        try:
            keep_functions_eager(patches, training.note)
            control_precision(patches, settings.precision)
            control_loss_scales(patches, training)
            LayerWatch(training).put_on(patches)
            LossWatch(training, scaler).put_on(patches)
            StepWatch(training, scaler).put_on(patches)
            yield training.notes
        finally:
            patches.undo()
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
