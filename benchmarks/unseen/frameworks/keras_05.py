import numpy as np
import keras
from keras import layers

keras.config.set_dtype_policy("float16")
keras.utils.set_random_seed(8)

rng = np.random.default_rng(8)
x = rng.normal(size=(1280, 32)).astype("float32")
proj = rng.normal(size=(32, 5)).astype("float32")
labels = np.argmax(x @ proj, axis=1)

inp = keras.Input(shape=(32,))
h = layers.Dense(64, activation="relu", name="hidden_a")(inp)
skip = h
h = layers.Dense(64, activation="relu", name="hidden_b")(h)
h = layers.Add(name="join")([h, skip])
out = layers.Dense(5, name="logits")(h)
clf = keras.Model(inp, out, name="classifier")

clf.compile(
    optimizer=keras.optimizers.Adam(learning_rate=2e-3, epsilon=1e-8),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
for epoch in range(3):
    order = rng.permutation(len(x))
    for b in range(0, len(x), 64):
        rows = order[b:b + 64]
        loss = clf.train_on_batch(x[rows], labels[rows])
        if (b // 64) % 4 == 0:
            print(f"epoch {epoch} batch {b // 64:2d} running loss {float(loss):.4f}")
