"""Watched and unwatched training in one process, and what is left behind; prints JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.keras.instruments import watching
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.records import Cadence

PATCHED = [
    (keras.layers.Layer, "__call__"), (keras.Operation, "__call__"), (tf, "cast"),
    (keras.optimizers.Optimizer, "apply"), (keras.optimizers.LossScaleOptimizer, "apply"),
    (keras.optimizers.Optimizer, "scale_loss"), (tf.GradientTape, "gradient"),
    (keras.optimizers.LossScaleOptimizer, "__init__"), (keras.DTypePolicy, "_parse_name"),
    (keras.optimizers.LossScaleOptimizer, "scale_loss"), (keras.losses.Loss, "__call__"),
    (keras.optimizers.Optimizer, "_get_current_learning_rate"),
    (keras.Variable, "_initialize_with_initializer"),
]  # fmt: skip


def sequential() -> Any:
    """Dropout and moving averages: state that a second look could disturb."""
    return keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3, dtype="float32"),
        ]
    )


def functional() -> Any:
    """With operations between layers, a shared layer, and nested structure."""
    inputs = keras.Input((6, 6, 1))
    x = keras.layers.Reshape((36, 1))(inputs)
    shared = keras.layers.Dense(8, name="shared")
    x = shared(x) + keras.ops.sin(shared(x * 2.0))
    x = keras.layers.LSTM(4)(x[:, :5])
    return keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(x))


class Overflowing(keras.Model):  # type: ignore[misc]
    """An op of the user's own overflows at every step, inside a layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Square()
        self.head = keras.layers.Dense(3, dtype="float32")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.inner(tf.reshape(x, (-1, 36)), training=training))


class Square(keras.layers.Layer):  # type: ignore[misc]
    """Squares of numbers in the hundreds."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = keras.layers.Dropout(0.5)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.drop(x * 1000.0, training=training)
        return tf.sqrt(1.0 + tf.square(x))


def train(make: Any, policy: str) -> tuple[Any, Any]:
    """Three steps of fit; every variable at the end, and the losses."""
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 6, 6, 1)).astype(np.float32)
    model = make()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=True,
    )
    history = model.fit(x, rng.integers(0, 3, 48), batch_size=16, epochs=1, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    digest = hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in variables)).hexdigest()
    return digest, history.history["loss"]


def two_tapes(at_once: bool) -> Any:
    """Two models in one step, each with its tape; both gradients at once, or step by step."""
    keras.config.set_dtype_policy("mixed_float16")
    models = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name=n)]) for n in "ab"]
    scaler = keras.optimizers.LossScaleOptimizer
    optimizers = [scaler(keras.optimizers.SGD(0.1), initial_scale=1024.0) for _ in models]
    recorder, true, sums = FrameworkRecorder(Cadence(1, 0, 0)), [], []
    recorder.backward = lambda path, values: sums.append(float(values.floats().sum()))
    with watching(recorder, ControlSettings()):
        for _ in range(2):
            with tf.GradientTape() as first, tf.GradientTape() as second:
                outs = [tf.cast(m(np.ones((8, 4))), tf.float32) for m in models]
                losses = [tf.reduce_mean(outs[0]) * 2.0, tf.reduce_mean(outs[1]) * 3.0]
                scaled = [o.scale_loss(v) for o, v in zip(optimizers, losses, strict=True)]
            true += [float(v) for v in losses]
            found = [first.gradient(scaled[0], models[0].trainable_variables)]
            if not at_once:
                optimizers[0].apply(found[0], models[0].trainable_variables)
            found.append(second.gradient(scaled[1], models[1].trainable_variables))
            if at_once:
                optimizers[0].apply(found[0], models[0].trainable_variables)
            optimizers[1].apply(found[1], models[1].trainable_variables)
    return {
        "true": true, "losses": [a.loss for a in recorder.optimizer_steps], "sums": sums,
        "scaled": [c.scaled for c in recorder.calls if c.name == "backward"],
    }  # fmt: skip


def accumulated() -> list[float | None]:
    """Nine calls whose weights move at each third; the shares that moved, by step."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    recorder = FrameworkRecorder(Cadence(0, 0, 0))
    with watching(recorder, ControlSettings()):
        for _ in range(9):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(np.ones((8, 4))))
            found = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(found, model.trainable_variables)
    return [a.moved_share for a in recorder.optimizer_steps]


def main() -> None:
    """All models and policies, without and with."""
    before = [vars(owner).get(name) for owner, name in PATCHED]
    cases = {}
    for make in (sequential, functional, Overflowing):
        for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
            plain = train(make, policy)
            recorder = FrameworkRecorder(Cadence(1, 0, 0))
            with watching(recorder, ControlSettings()) as notes:
                seen = train(make, policy)
            cases[f"{make.__name__} {policy}"] = {
                "same": plain[0] == seen[0], "steps": recorder.steps, "notes": notes,
                "loss": plain[1], "losses": [a.loss for a in recorder.optimizer_steps],
                "paths": [m.path for m in recorder.take().modules],
                "bad": [[b.module, b.op, b.fp32_finite, b.fp32_max, b.line, b.inputs[0].max_abs]
                        for b in recorder.bad_layers.records()],
            }  # fmt: skip
    every = ControlSettings(
        "fp32", 4.0, 2.0, 3, 0.5, 1e-4, ("a",), True
    )  # all controls at once: they must all come off again
    with watching(FrameworkRecorder(Cadence(0, 0, 0)), every):
        changed = [vars(o).get(n) is not b for (o, n), b in zip(PATCHED, before, strict=True)]
    after = [vars(owner).get(name) for owner, name in PATCHED]
    left = [f"{o.__name__}.{n}" for (o, n), b, a in zip(PATCHED, before, after, strict=True)
            if a is not b]  # fmt: skip
    json.dump(
        {
            "cases": cases, "left": left, "changed": all(changed),
            "accumulated": accumulated(), "tapes": [two_tapes(True), two_tapes(False)],
            "eager": tf.config.functions_run_eagerly(), "script": Path(__file__).name,
        },
        sys.stdout,
    )  # fmt: skip


if __name__ == "__main__":
    main()
