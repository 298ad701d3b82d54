"""Stance of short forum posts: padded tokens, masked attention pooling, noisy annotators."""
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import numpy as np
import keras
from keras import layers, ops

keras.utils.set_random_seed(40)
keras.mixed_precision.set_global_policy("mixed_float16")

VOCAB, LENGTH = 4000, 32


def posts(n, seed):
    rng = np.random.default_rng(seed)
    tok = np.minimum(rng.zipf(1.3, (n, LENGTH)), VOCAB - 1)
    size = rng.integers(4, LENGTH, n)
    tok[np.arange(LENGTH)[None] >= size[:, None]] = 0
    lean = np.where(tok % 5 == 1, 1.0, 0.0).sum(1) - np.where(tok % 5 == 2, 1.0, 0.0).sum(1)
    y = (lean > np.median(lean)).astype("int32")
    flip = rng.random(n) < 0.3
    return tok.astype("int32"), np.where(flip, 1 - y, y)


class MaskedPool(layers.Layer):
    def build(self, shape):
        self.score = layers.Dense(1, name="score")
        self.score.build(shape)

    def call(self, h, tokens):
        s = ops.squeeze(self.score(h), -1)
        s = ops.where(ops.equal(tokens, 0), ops.full_like(s, -3e4), s)
        w = ops.softmax(s, axis=-1)
        return ops.sum(h * w[..., None], axis=1)


tokens = keras.Input((LENGTH,), dtype="int32")
h = layers.Embedding(VOCAB, 32, name="emb")(tokens)
h = layers.Dense(64, activation="relu", name="up")(h)
p = MaskedPool(name="pool")(h, tokens)
p = layers.Dropout(0.1)(layers.Dense(32, activation="relu", name="neck")(p))
logit = layers.Dense(1, dtype="float32", name="stance")(p)
model = keras.Model(tokens, logit)
model.compile(
    optimizer=keras.optimizers.Adam(3e-3),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
x, y = posts(3200, 6)
model.fit(x, y, batch_size=64, epochs=4, verbose=2)
