"""A custom loop under mixed_float16, and nobody scales the loss."""

import keras
import numpy as np
import tensorflow as tf

keras.config.set_dtype_policy("mixed_float16")

rng = np.random.default_rng(5)
signals = rng.normal(size=(256, 32)).astype("float32")
targets = np.tanh(signals @ rng.normal(size=(32, 32)) * 0.3).astype("float32")


class Denoiser(keras.Model):
    def __init__(self):
        super().__init__()
        self.encode = keras.layers.Dense(64, activation="tanh")
        self.middle = keras.layers.Dense(64, activation="tanh")
        self.decode = keras.layers.Dense(32, dtype="float32")

    def call(self, x):
        return self.decode(self.middle(self.encode(x)))


model = Denoiser()
optimizer = keras.optimizers.SGD(1e6)  # the loss is in other units, hence the rate

for step in range(60):
    at = step * 32 % 256
    x, y = signals[at : at + 32], targets[at : at + 32]
    with tf.GradientTape() as tape:
        error = model(x, training=True) - y
        loss = 2e-7 * tf.reduce_mean(tf.square(error))
    gradients = tape.gradient(loss, model.trainable_weights)
    optimizer.apply(gradients, model.trainable_weights)
    if step % 20 == 0:
        print(step, float(loss))
