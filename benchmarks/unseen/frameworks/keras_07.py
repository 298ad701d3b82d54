import numpy as np
import tensorflow as tf
import keras
from keras import layers, ops

keras.utils.set_random_seed(2)
keras.config.set_dtype_policy("mixed_bfloat16")

VOCAB, LEN = 60, 24
rng = np.random.default_rng(2)
tokens = rng.integers(1, VOCAB, size=(1024, LEN))
y = (np.isin(tokens, [3, 14, 15, 40]).sum(1) >= 2).astype("float32")[:, None]

ids = keras.Input((LEN,), dtype="int32")
pos = layers.Embedding(LEN, 32, name="pos")(ops.broadcast_to(ops.arange(LEN), (1, LEN)))
e = layers.Embedding(VOCAB, 32, name="tok", embeddings_initializer=keras.initializers.RandomNormal(stddev=6.0))(ids)
e = layers.Rescaling(40.0, name="gain")(e + pos)
a = layers.MultiHeadAttention(4, 8, name="mha")(layers.LayerNormalization(name="ln1")(e),
                                               layers.LayerNormalization(name="ln1b")(e))
e = layers.LayerNormalization(name="ln2")(e / 40.0 + a)
z = layers.GlobalAveragePooling1D()(layers.Dense(64, activation="gelu")(e))
logit = layers.Dense(1, dtype="float32")(z)
model = keras.Model(ids, logit)

opt = keras.optimizers.AdamW(4e-3)
loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)


@tf.function
def step(xb, yb):
    with tf.GradientTape() as tape:
        loss = loss_fn(yb, model(xb, training=True))
    g = tape.gradient(loss, model.trainable_variables)
    g, norm = tf.clip_by_global_norm(g, 1.0)
    opt.apply_gradients(zip(g, model.trainable_variables))
    return loss, norm


for s in range(70):
    sel = rng.integers(0, 1024, 64)
    l, n = step(tf.constant(tokens[sel], tf.int32), tf.constant(y[sel]))
    if s % 7 == 0 or s == 69:
        print(f"{s:3d} loss={float(l):.4f} gnorm={float(n):.3f}")
