"""Isotope identification from gamma spectra: a conv branch over relative line strengths."""
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np
import keras
from keras import layers, ops

keras.utils.set_random_seed(8)
keras.mixed_precision.set_global_policy("mixed_float16")

BINS, ISOTOPES = 512, 6


class LineShare(layers.Layer):
    """Counts of each channel as a share of the whole record, in per mille."""

    def call(self, counts):
        whole = ops.sum(counts, axis=1, keepdims=True)
        return counts / (whole + 1.0) * 1000.0


class Detector(layers.Layer):
    def __init__(self, channels, **kw):
        super().__init__(**kw)
        self.share = LineShare(name="share")
        self.c1 = layers.Conv1D(channels, 9, strides=4, activation="relu", name="c1")
        self.c2 = layers.Conv1D(channels, 5, strides=4, activation="relu", name="c2")
        self.flat = layers.Flatten(name="flat")

    def build(self, shape):
        self.c1.build(shape)
        shape = self.c1.compute_output_shape(shape)
        self.c2.build(shape)

    def call(self, counts):
        return self.flat(self.c2(self.c1(self.share(counts))))


def spectra(n, seed):
    rng = np.random.default_rng(seed)
    lines = np.random.default_rng(99).integers(20, BINS - 20, (ISOTOPES, 3))
    y = rng.integers(0, ISOTOPES, n)
    e = np.arange(BINS)
    rate = np.repeat(1.0 + 2.0 * np.exp(-e / 200.0)[None], n, axis=0)
    for j in range(3):
        rate += 1.1 * np.exp(-((e[None] - lines[y, j][:, None]) ** 2) / 30.0)
    live_time = rng.uniform(80, 220, (n, 1))
    return rng.poisson(rate * live_time)[..., None].astype("float32"), y


inp = keras.Input((BINS, 1), name="counts")
z = Detector(12, name="detector")(inp)
z = layers.Dense(32, activation="relu", name="mix")(z)
out = layers.Dense(ISOTOPES, activation="softmax", dtype="float32", name="isotope")(z)
model = keras.Model(inp, out)
model.compile(
    optimizer=keras.optimizers.AdamW(1e-3, weight_decay=1e-4),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)

x, y = spectra(960, 1)
xv, yv = spectra(240, 2)
model.fit(x, y, validation_data=(xv, yv), batch_size=32, epochs=5, verbose=2)
