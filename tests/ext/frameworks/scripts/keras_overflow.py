"""Sensor readings in their raw units: the first wide layer leaves the range of half precision."""

import keras
import numpy as np

keras.mixed_precision.set_global_policy("mixed_float16")

rng = np.random.default_rng(3)
readings = rng.uniform(200.0, 4000.0, (512, 64)).astype("float32")
labels = (readings[:, :32].mean(axis=1) > readings[:, 32:].mean(axis=1)).astype("int32")

inputs = keras.Input((64,), name="readings")
x = keras.layers.Dense(128, kernel_initializer=keras.initializers.RandomNormal(0.5), name="wide")(
    inputs
)
x = keras.layers.BatchNormalization(name="norm", dtype="float32")(x)
x = keras.layers.ReLU(name="relu")(x)
x = keras.layers.Dense(32, activation="relu", name="narrow")(x)
outputs = keras.layers.Dense(2, dtype="float32", name="logits")(x)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.SGD(0.05),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(readings, labels, batch_size=32, epochs=2, verbose=0)
