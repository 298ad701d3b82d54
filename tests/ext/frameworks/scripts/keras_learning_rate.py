"""A learning rate at which nothing converges, in any precision."""

import keras
import numpy as np

keras.config.set_dtype_policy("mixed_float16")

rng = np.random.default_rng(4)
x = rng.normal(size=(640, 16)).astype("float32")
y = (x @ rng.normal(size=(16, 1))).astype("float32")

model = keras.Sequential(
    [
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(1, dtype="float32"),
    ]
)
model.compile(optimizer=keras.optimizers.SGD(2.0), loss="mse")
model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
