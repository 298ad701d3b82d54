"""Drives Keras' real LossScaleOptimizer; run by a Python that has Keras and TensorFlow.

Reads JSON from standard input: a list of {"settings": {…}, "found_inf": "0110…"}. Writes the scale
after every step, for each, as JSON.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf


def driven(settings: dict[str, Any], found_inf: str) -> list[float]:
    """Scale after every step; the step itself is compiled, as fit() does it."""
    weight = keras.Variable(np.zeros(1, np.float32))
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0),
        initial_scale=settings["initial_scale"],
        dynamic_growth_steps=settings["growth_interval"],
    )
    optimizer.build([weight])

    @tf.function
    def step(gradient: Any) -> Any:
        optimizer.apply([gradient], [weight])
        return optimizer.dynamic_scale.value

    gradients = {"1": tf.constant([math.inf]), "0": tf.constant([0.0])}
    return [float(step(gradients[found])) for found in found_inf]


if __name__ == "__main__":
    answers = [driven(job["settings"], job["found_inf"]) for job in json.load(sys.stdin)]
    print(json.dumps({"version": keras.__version__, "scales": answers}))
