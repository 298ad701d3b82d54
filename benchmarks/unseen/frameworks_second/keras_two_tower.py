"""Two-tower matching of job adverts and CVs with a shared compact tower setup."""
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np
import keras
from keras import layers, ops

keras.utils.set_random_seed(17)
keras.mixed_precision.set_global_policy("mixed_float16")

TOWERS = {
    "advert": {"units": (64, 32), "dtype": "float16"},
    "cv": {"units": (64, 32), "dtype": "float16"},
}


def tower(name, width):
    spec = TOWERS[name]
    inp = keras.Input((width,))
    h = inp
    for i, u in enumerate(spec["units"]):
        last = i == len(spec["units"]) - 1
        h = layers.Dense(u, activation=None if last else "tanh",
                         dtype=spec["dtype"], name=f"{name}_fc{i}")(h)
    return keras.Model(inp, h, name=name)


class Matcher(keras.Model):
    def __init__(self, wa, wc):
        super().__init__()
        self.advert = tower("advert", wa)
        self.cv = tower("cv", wc)
        self.score = layers.Dense(1, dtype="float32", name="score")

    def call(self, inputs):
        a, c = inputs
        a, c = self.advert(a), self.cv(c)
        return self.score(ops.concatenate([a * c, ops.abs(a - c)], axis=-1))


def pairs(n, seed):
    rng = np.random.default_rng(seed)
    proj = np.random.default_rng(1000).normal(size=(2, 6, 24)) / 2.5
    need = rng.normal(size=(n, 6))
    y = rng.integers(0, 2, n)
    have = np.where(y[:, None] == 1, need, rng.normal(size=(n, 6)))
    a = need @ proj[0] + 0.1 * rng.normal(size=(n, 24))
    c = have @ proj[1] + 0.1 * rng.normal(size=(n, 24))
    return a.astype("float32"), c.astype("float32"), y.astype("float32")


a, c, y = pairs(4000, 4)
model = Matcher(24, 24)
model.compile(
    optimizer=keras.optimizers.Adam(3e-3),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
history = model.fit((a, c), y, batch_size=100, epochs=6, verbose=2)
print("last", history.history["loss"][-1])
