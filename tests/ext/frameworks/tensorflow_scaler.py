"""Drives TensorFlow 1's real DynamicLossScale (in compat.v1); run by a Python that has TensorFlow.

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

import tensorflow as tf
from tensorflow.python.training.experimental.loss_scale import DynamicLossScale

# The graph optimizer turns a division by a constant into a product with its reciprocal, which
# differs in the last bit where the multiplier is no power of two.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def driven(settings: dict[str, Any], found_inf: str) -> list[float]:
    """Scale after every step."""
    scale = DynamicLossScale(
        initial_loss_scale=settings["initial_scale"],
        increment_period=settings["growth_interval"],
        multiplier=settings["growth_factor"],
    )

    @tf.function
    def step(gradient: Any) -> Any:
        scale.update([gradient])
        return scale()

    gradients = {"1": tf.constant([math.inf]), "0": tf.constant([0.0])}
    return [float(step(gradients[found])) for found in found_inf]


if __name__ == "__main__":
    answers = [driven(job["settings"], job["found_inf"]) for job in json.load(sys.stdin)]
    print(json.dumps({"version": tf.__version__, "scales": answers}))
