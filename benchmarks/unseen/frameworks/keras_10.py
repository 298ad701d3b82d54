import numpy as np
import keras
from keras import layers, ops

keras.utils.set_random_seed(9)
keras.mixed_precision.set_global_policy("mixed_float16")

rng = np.random.default_rng(9)
n, side = 256, 32
grid = np.linspace(-1, 1, side, dtype="float32")
gx, gy = np.meshgrid(grid, grid)
cls = rng.integers(0, 2, size=n)
sig = np.where(cls == 1, 0.45, 0.25).astype("float32")
amp = rng.uniform(80, 120, size=n).astype("float32")
frames = amp[:, None, None] * np.exp(-(gx ** 2 + gy ** 2)[None] / (2 * sig[:, None, None] ** 2))
frames = (frames + rng.poisson(60.0, size=frames.shape))[..., None].astype("float32")

inp = keras.Input((side, side, 1))
x = layers.Conv2D(6, 3, padding="same", activation="relu", kernel_initializer="he_normal", name="conv_a")(inp)
x = layers.Conv2D(12, 3, padding="same", activation="relu", kernel_initializer="he_normal", name="conv_b")(x)
flux = layers.Lambda(lambda t: ops.sum(t, axis=(1, 2)), output_shape=(12,), name="flux")(x)
x = layers.BatchNormalization(momentum=0.9, name="flux_norm")(flux)
x = layers.Dense(32, activation="relu", name="mlp")(x)
out = layers.Dense(2, activation="softmax", dtype="float32", name="probs")(x)
model = keras.Model(inp, out)

model.compile(optimizer=keras.optimizers.Adam(5e-3), loss="sparse_categorical_crossentropy")
history = model.fit(frames, cls, batch_size=32, epochs=5, verbose=2)
print(history.history["loss"])
