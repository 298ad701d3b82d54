"""The shared MLP trained in plain Keras, and its numbers counted with NumPy: nothing watches here.

Prints JSON: loss and scale of every step, the exponents of every layer's output and of the gradient
that comes back to it (through a custom gradient that looks at it), and the weights at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from ampscope.ext.frameworks.networks import network

STEPS, INIT_SCALE, INTERVAL = 4, 2.0**24, 2
LAYERS = ("fc1", "relu1", "fc2", "relu2", "fc3")


def main() -> None:
    """Train."""
    keras.config.set_dtype_policy("mixed_float16")
    shared = network("mlp", 5)
    layers = {
        "fc1": keras.layers.Dense(128), "relu1": keras.layers.ReLU(),
        "fc2": keras.layers.Dense(64), "relu2": keras.layers.ReLU(),
        "fc3": keras.layers.Dense(10, dtype="float32"),
    }  # fmt: skip
    weights = []
    for name, size in (("fc1", 64), ("fc2", 128), ("fc3", 64)):
        layers[name].build((None, size))
        layers[name].kernel.assign(shared.weights[f"{name}.weight"].T)
        layers[name].bias.assign(shared.weights[f"{name}.bias"])
        weights += [layers[name].kernel, layers[name].bias]
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(shared.lr), initial_scale=INIT_SCALE, dynamic_growth_steps=INTERVAL
    )
    optimizer.build(weights)
    batches, steps = shared.batches(), []
    for _ in range(STEPS):
        images, labels = next(batches)
        seen: dict[str, Any] = {}
        scale = float(optimizer.dynamic_scale.numpy())
        with tf.GradientTape() as tape:
            x: Any = tf.constant(images)
            for name in LAYERS:
                x = tapped(layers[name](x), name, seen)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)
            loss = tf.reduce_mean(losses)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            owner = next(
                name
                for name, layer in layers.items()
                if any(weight is own for own in layer.trainable_variables)
            )
            seen.setdefault(f"{owner} weight_grad", []).append(gradient.numpy())
        optimizer.apply(gradients, weights)
        counts = {key: counted(arrays) for key, arrays in seen.items()}
        steps.append({"loss": float(loss), "scale": scale, "counts": counts})
    digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights)).hexdigest()
    json.dump({"steps": steps, "weights": digest}, sys.stdout)


def tapped(x: Any, name: str, seen: dict[str, Any]) -> Any:
    """``x``, with its values and its gradient's kept."""
    seen[f"{name} activation"] = [x.numpy()]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(value: Any) -> Any:
        def back(gradient: Any) -> Any:
            seen[f"{name} grad_output"] = [gradient.numpy()]
            return gradient

        return tf.identity(value), back

    return identity(x)


def counted(arrays: list[Any]) -> dict[str, int]:
    """How many of each power of two, zero and what is not finite."""
    found: Counter[str] = Counter()
    for array in arrays:
        wide = array.astype(np.float64).ravel()
        for value in wide:
            if value == 0:
                found["zero"] += 1
            elif not np.isfinite(value):
                found["nonfinite"] += 1
            else:
                found[str(np.frexp(value)[1] - 1)] += 1
    return dict(found)


if __name__ == "__main__":
    main()
