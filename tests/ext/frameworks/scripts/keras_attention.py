"""Queries times keys before anything scales them: the logits leave the range of half precision."""

import keras
import numpy as np
from keras import ops

keras.utils.set_random_seed(3)
keras.mixed_precision.set_global_policy("mixed_float16")


class Mixer(keras.layers.Layer):
    def __init__(self, width, **named):
        super().__init__(**named)
        self.query = keras.layers.Dense(width, use_bias=False, name="query")
        self.key = keras.layers.Dense(width, use_bias=False, name="key")

    def build(self, shape):
        self.query.build(shape)
        self.key.build(shape)

    def call(self, x):
        logits = ops.matmul(self.query(x), ops.transpose(self.key(x), (0, 2, 1)))
        return ops.matmul(ops.softmax(logits / 4096.0), x) / 64.0


rng = np.random.default_rng(3)
labels = rng.integers(0, 2, 640).astype("int32")
tokens = 64.0 + 16.0 * rng.normal(size=(640, 8, 32)) + 24.0 * labels[:, None, None]

inputs = keras.Input((8, 32), name="tokens")
x = Mixer(64, name="mixer")(inputs)
x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
outputs = keras.layers.Dense(2, dtype="float32", name="logits")(x)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(2e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(tokens.astype("float32"), labels, batch_size=32, epochs=3, verbose=0)
