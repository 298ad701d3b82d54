"""A constant loss scale, far too large for the gradients of the first layers."""

import keras
import numpy as np

keras.config.set_dtype_policy("mixed_float16")

rng = np.random.default_rng(0)
x = rng.normal(size=(960, 20)).astype("float32")
y = (x @ rng.normal(size=20)).astype("float32")[:, None]

model = keras.Sequential(
    [
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(1, dtype="float32"),
    ]
)
optimizer = keras.optimizers.SGD(0.01, loss_scale_factor=2.0**24)
model.compile(optimizer=optimizer, loss="mse", auto_scale_loss=False)
model.fit(x, y, batch_size=32, epochs=1, verbose=0)
