"""One broken sample in the data."""

import keras
import numpy as np

keras.config.set_dtype_policy("mixed_float16")

rng = np.random.default_rng(2)
x = rng.normal(size=(640, 16)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
x[200, 3] = np.nan

model = keras.Sequential(
    [
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(2, dtype="float32"),
    ]
)
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
