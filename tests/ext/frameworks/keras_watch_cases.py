"""The callback in every kind of fit, each also without it; prints JSON.

The oracle is a callback of its own that reads Keras' variables, and Keras' history.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from ampscope.ext.frameworks.keras import Watch

STORE = sys.argv[1]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
rng = np.random.default_rng(0)
X = rng.normal(size=(320, 12)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)


class Oracle(keras.callbacks.Callback):  # type: ignore[misc]
    """Scale and steps of the inner optimizer after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []
        self.steps: list[int] = []
        self.reported: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            self.scales.append(float(tf.convert_to_tensor(optimizer.dynamic_scale.value)))
        self.reported.append(float(logs["loss"]))
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        self.steps.append(int(tf.convert_to_tensor(inner._iterations.value)))


def plain(initial_scale: float = 2.0**22, **compiled: Any) -> Any:
    model = keras.Sequential(
        [
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(2, dtype="float32"),
        ]
    )
    scaler = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-2, 30)),
        initial_scale=initial_scale,
        dynamic_growth_steps=5,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=scaler, loss=loss, metrics=["accuracy"], **compiled)
    return model


def accumulated() -> Any:
    """The weights move at every third batch; overflows in between count as skips."""
    model = plain()
    scaler = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1e-2, gradient_accumulation_steps=3),
        initial_scale=2.0**22,
        dynamic_growth_steps=5,
    )
    model.compile(optimizer=scaler, loss=model.loss)
    return model


def eager() -> Any:
    return plain(run_eagerly=True)


def two_outputs() -> Any:
    inputs = keras.Input((12,))
    x = keras.layers.Dense(8, activation="relu")(inputs)
    outputs = {
        "kind": keras.layers.Dense(2, dtype="float32", name="kind")(x),
        "size": keras.layers.Dense(1, dtype="float32", name="size")(x),
    }
    model = keras.Model(inputs, outputs)
    kind = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss={"kind": kind, "size": "mse"})
    return model


class Custom(keras.Model):  # type: ignore[misc]
    """A training step of its own, with a loss that Keras does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2, dtype="float32")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x, training=True))
            loss = tf.reduce_mean(losses)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def custom() -> Any:
    model = Custom()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss)  # validation asks for it
    return model


def mirrored() -> Any:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        # Low: an overflow in the second replica goes unnoticed by Keras, and ends in NaN.
        return plain(2.0**4, jit_compile=False)


def fitted(make: Any, watch: Watch | None, fits: int, y: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy("mixed_float16")
    model, oracle, losses = make(), Oracle(), []
    for _ in range(fits):
        callbacks = [oracle] if watch is None else [oracle, watch]
        history = model.fit(
            X, y, batch_size=32, epochs=2, validation_split=0.2, verbose=0, callbacks=callbacks
        )
        losses += history.history["loss"]
    variables = [np.asarray(tf.convert_to_tensor(v.value)) for v in
                 (*model.variables, *model.optimizer.variables)]  # fmt: skip
    return {
        "digest": hashlib.sha256(b"".join(v.tobytes() for v in variables)).hexdigest(),
        "losses": losses, "scales": oracle.scales, "steps": oracle.steps,
        "reported": oracle.reported,
        "own_function": "Watch" not in getattr(model.train_function, "__qualname__", "")
        and "_Fit" not in getattr(model.train_function, "__qualname__", ""),
    }  # fmt: skip


def failing(how: str) -> dict[str, Any]:
    keras.config.set_dtype_policy("mixed_float16")
    watch, model, raised = Watch(STORE, label=how), plain(), ""
    sys.last_value = ValueError("of an earlier cell")  # as a notebook has it

    class Later(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise ValueError("another callback")

    def batches() -> Any:
        yield from ((X[:32], Y[:32]) for _ in range(3))
        raise OSError("the disk is gone")

    try:
        if how == "data":
            model.fit(batches(), steps_per_epoch=9, verbose=0, callbacks=[watch])
        else:
            model.fit(X, Y, batch_size=32, verbose=0, callbacks=[watch, Later()])
    except Exception as error:
        raised = type(error).__name__
    return {"run": watch.runs[-1], "raised": raised}


def without_a_store() -> dict[str, Any]:
    """A fit whose store cannot be made: what is warned of, and that it trained all the same."""
    watch, model = Watch(f"{STORE}/runs.db"), plain()  # below a file
    with warnings.catch_warnings(record=True, action="always") as said:
        model.fit(X, Y, batch_size=32, verbose=0, callbacks=[watch])
    warned = [str(w.message) for w in said if "ampscope" in str(w.message)]
    return {"warned": warned, "runs": watch.runs, "built": bool(model.built)}


def remembered() -> dict[str, int]:
    """What an eager fit with histograms holds in memory at its end."""
    watch, found = Watch(STORE, histograms_every=2), {}

    class Last(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            recorder = watch._fit._recorder  # type: ignore[union-attr]
            watch._fit.run._now = lambda: 1e9 + recorder.steps  # a second a step, from now on
            found.update(steps=len(recorder.optimizer_steps), calls=len(recorder.calls))

    eager().fit(X, Y, batch_size=16, verbose=0, callbacks=[watch, Last()])
    return found


def main() -> None:
    cases: dict[str, Any] = {}
    two = {"kind": Y, "size": X[:, :1]}
    for name, make, fits, y in (
        ("plain", plain, 1, Y), ("several fits", plain, 2, Y), ("eager", eager, 1, Y),
        ("two outputs", two_outputs, 1, two), ("custom step", custom, 1, Y),
        ("mirrored", mirrored, 1, Y), ("accumulated", accumulated, 1, Y),
    ):  # fmt: skip
        watch = Watch(STORE, histograms_every=2 if name == "eager" else 0, label=name)
        without, seen = fitted(make, None, fits, y), fitted(make, watch, fits, y)
        cases[name] = {"without": without, "watched": seen, "runs": watch.runs}
    cases["data"], cases["callback"] = failing("data"), failing("callback")
    cases["remembered"], cases["without a store"] = remembered(), without_a_store()
    json.dump(cases, sys.stdout)


if __name__ == "__main__":
    main()
