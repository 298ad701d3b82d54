"""Counts as shares of their sum, which leaves the range of half precision: all shares are zero."""

import keras
import numpy as np

keras.utils.set_random_seed(3)
keras.mixed_precision.set_global_policy("mixed_float16")


class Shares(keras.layers.Layer):
    def call(self, counts):
        return counts / keras.ops.sum(counts, axis=-1, keepdims=True) * 500.0


rng = np.random.default_rng(3)
labels = rng.integers(0, 3, 960).astype("int32")
peaks = np.eye(3).repeat(100, axis=1)[labels]
counts = rng.poisson(300.0 + 60.0 * peaks).astype("float32")

inputs = keras.Input((300,), name="counts")
x = Shares(name="shares")(inputs)
x = keras.layers.Dense(16, activation="relu", name="hidden")(x)
outputs = keras.layers.Dense(3, dtype="float32", name="logits")(x)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(counts, labels, batch_size=32, epochs=3, verbose=0)
