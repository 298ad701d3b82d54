import numpy as np
import keras

keras.utils.set_random_seed(5)
keras.config.set_dtype_policy("mixed_float16")

rng = np.random.default_rng(5)
labels = rng.integers(0, 4, size=1024)
images = rng.normal(0, 0.5, size=(1024, 16, 16, 1)).astype("float32")
for k in range(4):
    r, c = divmod(k, 2)
    images[labels == k, r * 8:r * 8 + 8, c * 8:c * 8 + 8] += 1.0

net = keras.Sequential([
    keras.layers.Input((16, 16, 1)),
    keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
    keras.layers.MaxPooling2D(),
    keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
    keras.layers.GlobalAveragePooling2D(),
    keras.layers.Dense(4, dtype="float32"),
])

optimizer = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(5e-3), initial_scale=2.0 ** 28, dynamic_growth_steps=200)
net.compile(optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"])


class Log(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        s = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
        print(f"batch {batch:2d} loss {logs['loss']:.4f} scale {s:.0f}")


net.fit(images, labels, batch_size=64, epochs=4, verbose=0, callbacks=[Log()])
