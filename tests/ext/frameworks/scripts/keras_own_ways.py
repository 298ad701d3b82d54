"""A regression whose author wants graphs, and Keras on another backend."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

tf.config.run_functions_eagerly(False)
keras.mixed_precision.set_global_policy("mixed_float16")
rng = np.random.default_rng(0)
readings = rng.normal(size=(256, 8)).astype("float32")
answers = readings @ rng.normal(size=(8, 1)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, dtype="float32")])
model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
print(model.fit(readings, answers, batch_size=32, epochs=3, verbose=0).history["loss"])
