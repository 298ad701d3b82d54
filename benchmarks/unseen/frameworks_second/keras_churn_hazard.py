"""Discrete-time churn: a hazard per month, fitted by the survival likelihood."""
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np
import keras
from keras import layers, ops

keras.utils.set_random_seed(3)
keras.mixed_precision.set_global_policy("mixed_float16")

MONTHS = 10
FEATURES = 14


def customers(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, FEATURES)).astype("float32")
    term = np.maximum((3.5 + 2.6 * x[:, 0] + 1.2 * np.tanh(x[:, 1])).astype(int), 0)
    left = np.zeros((n, MONTHS), "float32")
    at_risk = np.zeros((n, MONTHS), "float32")
    for i, t in enumerate(term):
        at_risk[i, : t + 1] = 1.0
        if t < MONTHS:
            left[i, t] = 1.0
    return x, np.concatenate([left, at_risk], axis=1)


def survival_nll(target, hazard):
    left, at_risk = target[:, :MONTHS], target[:, MONTHS:]
    hit = left * ops.log(hazard)
    stay = (1.0 - left) * ops.log(1.0 - hazard)
    return -ops.sum(at_risk * (hit + stay), axis=-1)


class Trunk(layers.Layer):
    def __init__(self, width, depth, **kw):
        super().__init__(**kw)
        self.stack = [layers.Dense(width, activation="swish", name=f"fc{i}") for i in range(depth)]
        self.norm = layers.LayerNormalization(name="ln")

    def build(self, shape):
        for d in self.stack:
            d.build(shape)
            shape = d.compute_output_shape(shape)
        self.norm.build(shape)

    def call(self, x):
        for d in self.stack:
            x = d(x)
        return self.norm(x)


inputs = keras.Input((FEATURES,))
h = Trunk(96, 2, name="trunk")(inputs)
hazard = layers.Dense(MONTHS, activation="sigmoid", name="hazard")(h)
model = keras.Model(inputs, hazard)
model.compile(optimizer=keras.optimizers.Adam(2e-3), loss=survival_nll)

x, t = customers(3000, 1)
log = model.fit(x, t, batch_size=100, epochs=8, verbose=2)
print("nll by epoch:", [round(float(v), 4) for v in log.history["loss"]])
