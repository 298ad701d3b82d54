"""Everything in float16, Adam's moments included."""

import keras
import numpy as np

keras.config.set_dtype_policy("float16")

rng = np.random.default_rng(6)
x = rng.normal(size=(640, 24)).astype("float16")
y = (x[:, :12].sum(axis=1) > x[:, 12:].sum(axis=1)).astype("int32")

model = keras.Sequential(
    [
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(2),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(1e-3, epsilon=1e-8),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(x, y, batch_size=32, epochs=3, verbose=0)
