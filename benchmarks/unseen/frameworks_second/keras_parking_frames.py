"""Occupied / free classification of parking bays from patchified camera frames."""
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np
import keras
from keras import layers, ops

keras.utils.set_random_seed(11)
keras.mixed_precision.set_global_policy("mixed_float16")

CFG = dict(patches=25, pixels=48, width=64, steps=150, batch=24, lr=1e-3, log_tau=-9.2)


class BayMixer(layers.Layer):
    """Patches look at each other; the temperature is learnt."""

    def __init__(self, width, log_tau, **kw):
        super().__init__(**kw)
        self.q = layers.Dense(width, use_bias=False, name="q")
        self.k = layers.Dense(width, use_bias=False, name="k")
        self.v = layers.Dense(width, name="v")
        self.log_tau0 = log_tau

    def build(self, shape):
        for d in (self.q, self.k, self.v):
            d.build(shape)
        self.log_tau = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(self.log_tau0), name="log_tau")

    def call(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        sim = ops.matmul(q, ops.transpose(k, (0, 2, 1)))
        att = ops.softmax(sim * ops.exp(self.log_tau), axis=-1)
        return ops.matmul(att, v)


class BayNet(keras.Model):
    def __init__(self, cfg):
        super().__init__()
        self.mixer = BayMixer(cfg["width"], cfg["log_tau"], name="mixer")
        self.norm = layers.LayerNormalization(name="norm")
        self.hidden = layers.Dense(48, activation="gelu", name="hidden")
        self.out = layers.Dense(2, dtype="float32", name="out")

    def call(self, x):
        h = self.norm(self.mixer(x))
        return self.out(ops.mean(self.hidden(h), axis=1))


def frames(rng, n, cfg):
    y = rng.integers(0, 2, n)
    light = np.where(rng.random(n) < 0.05, 150.0, 22.0)
    base = rng.random((n, cfg["patches"], cfg["pixels"])) * light[:, None, None]
    stripe = np.sin(np.arange(cfg["pixels"]) / 3.0) * 0.8
    car = rng.random((n, cfg["patches"], 1)) < 0.4
    base += y[:, None, None] * car * stripe * light[:, None, None] * 0.12
    return np.clip(base, 0, 255).astype("float32"), y.astype("int32")


rng = np.random.default_rng(5)
x, y = frames(rng, CFG["steps"] * CFG["batch"] // 3, CFG)
net = BayNet(CFG)
net.compile(
    optimizer=keras.optimizers.Adam(CFG["lr"]),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
hist = net.fit(x, y, batch_size=CFG["batch"], epochs=3, shuffle=True, verbose=2)
print("final loss", hist.history["loss"][-1])
